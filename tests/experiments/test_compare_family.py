"""What a comparison says: one family of contrasts with verdicts, laws in the width, times; whole or in part."""

import contextlib
import dataclasses
import json
import math
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from support.studies import ABOUT, COUNTS, ORIGIN, refuse_work

from experiments import sharing
from experiments.compare import clock, contrasts, figures, steps, widths
from experiments.compare.__main__ import STUDY
from experiments.compare.plan import CompareConfig, arms, narrow
from experiments.compare.record import Comparison, Trained, by_row, missing
from experiments.compare.report import files, losses
from experiments.compare.steps import StepTimes, step_times
from experiments.compare.trainings import Done, Plan
from experiments.compare.transfer import after_check, checks, corrected, transferred
from experiments.config import OutputConfig
from experiments.jobs import Arm
from experiments.measure import Measure
from experiments.records import Machine, Training, read
from experiments.statistics import equivalence, holm, paired
from experiments.study import FOLDER
from experiments.texts import WikiText2
from qkvflow.cli import parse
from qkvflow.errors import UserError
from qkvflow.locks import locked

SEEDS, MORE = [1, 2, 3, 4, 5], [7, 8]
NOISE = dict(zip([*SEEDS, *MORE], (0.0, 0.05, 0.1, -0.05, 0.02, 0.01, 0.03), strict=True))
# Of each system: its loss above that of `a`, and what is its own in each seed.
SHIFTS = {"a": 0.0, "same": 0.0, "little": 0.01, "far": 0.2, "open": 0.02}
OWN = {"a": 0.0, "same": 0.002, "little": 0.001, "far": 0.004, "open": 0.03}
CHECKED = {0.353e-3: 2.45, 0.705e-3: 2.3, 1.41e-3: 2.4, 2.82e-3: 2.5}  # of `a`; the third is the transferred one
CORRECTING = {"factors": [0.5, 1.0, 2.0], "corrects": True}
PAIRS = [[name, "a"] for name in ("same", "little", "far", "open")]


def loss_of(name: str, seed: int, width: int = 32) -> float:
    own = OWN[name] * math.sin(11 * seed + 3 * len(name))
    return 2.0 + SHIFTS[name] + NOISE[seed] + own - 0.1 * math.log2(width / 32)


def training(name: str, seed: int, width: int = 32, **more) -> dict:
    loss, rows = loss_of(name, seed, width), ["iso_step", "widths"] if width == 32 else ["widths"]
    curve = [(5, loss + 1.0), (10, loss)]
    found = {"system": name, "seed": seed, "width": width, "steps": 10, "rows": rows, "curve": curve}
    found |= {"learning_rate": 1e-3, "select_loss": loss, "report_loss": loss, "machine": "m"}
    return found | {"seconds_per_step": 0.2 if name == "far" else 0.05 if name == "open" else 0.1} | more


def record(results: list[dict] | None = None, progress=None, **keys) -> Comparison:
    names = list(SHIFTS)
    if results is None:
        results = [training(name, seed, width) for width in (32, 16, 64) for seed in SEEDS for name in names]
    searched = [
        {"system": name, "seed": 9, "width": 16, "steps": 10, "rows": [], "learning_rate": rate, "select_loss": loss}
        for name in names
        for rate, loss in ((1e-3, 2.5), (2e-3, 2.4), (4e-3, 2.3 if name == "far" else 2.6))
    ]
    at_own = searched[0] | {"width": 32}
    checks = [at_own | {"learning_rate": rate, "select_loss": loss} for rate, loss in CHECKED.items()]
    cost = {"parameters": 1e6, "materialised": 1e6, "evaluations": 6, "flops": 1e9, "tokens": 512}
    protocol = {"arms": {name: {} for name in names}, "reference": "a", "rows": ["iso_step", "iso_time"], "steps": 10}
    protocol |= {"seeds": SEEDS, "more_seeds": MORE, "contrasts": PAIRS, "widths": [16, 32, 64], "ngrams": 2}
    protocol |= {"search_width": 16, "learning_rates": [1e-3, 2e-3, 4e-3], "selection_seeds": [9]}
    protocol |= {"check_rates": CORRECTING | {"arms": ["a"]}, "margin": 0.02}
    protocol |= {"published": {"about": "Invented.", "losses": {"same": 1.25}}, **keys}
    costs = {f"{name}-d{width}-s10": cost for name in names for width in (16, 32, 64)}
    found = {"protocol": protocol | ABOUT, "costs": costs, "results": results, "selection": searched, "checks": checks}
    return read(Comparison, found | {"progress": progress or {}} | ORIGIN)


def test_each_contrast_has_two_corrected_tests_and_a_verdict():
    found = contrasts.tests(record().protocol, record().losses())
    verdicts = {each.arm: each.verdict for each in found}
    assert verdicts["little"] == "different but within the margin"
    assert (verdicts["same"], verdicts["far"], verdicts["open"]) == ("equivalent", "different", "neither")
    own = {name: {seed: loss_of(name, seed) for seed in SEEDS} for name in SHIFTS}
    differences = [paired(own[arm], own["a"]) for arm, _ in PAIRS]
    assert [each.p_holm for each in found] == holm([d.p for d in differences])
    assert [each.p_within for each in found] == holm([equivalence(d, 0.02).p for d in differences])


def test_only_open_contrasts_ask_for_more_seeds_and_only_when_the_first_are_there():
    own = {name: {seed: loss_of(name, seed) for seed in SEEDS} for name in SHIFTS}
    config = CompareConfig(seeds=SEEDS, contrasts=[tuple(pair) for pair in PAIRS], margin=0.02)
    assert contrasts.undecided(config, own) == [("open", "a")]
    more = {name: values | {7: 0.0} for name, values in own.items()}
    assert contrasts.undecided(config, more) == [("open", "a")], "it depends on the first seeds alone"
    assert contrasts.undecided(config, own | {"open": {1: 2.0, 2: 2.1}}) == []
    assert contrasts.undecided(config, {name: own[name] for name in ("a", "same")}) == []


def test_more_seeds_are_marked_and_said():
    results = [training(name, seed) for seed in SEEDS for name in SHIFTS]
    results += [training(name, seed) for seed in MORE for name in ("a", "open")]
    text = STUDY.filled_page(record(results))
    assert "| open - a | 7 * |" in text
    assert "| same - a | 5 |" in text
    assert "so that their p are not exact" in text
    assert "## At the same number of steps (n = 5 to 7)" in text
    assert "| model | width | trained | materialised | steps | FLOPs | rate | n | loss |" in text


@pytest.mark.parametrize(("done", "rows"), [(0, ["iso_step"]), (1, ["iso_step", "iso_flop"])])
def test_a_row_is_shown_once_a_training_of_its_own_is_there(done, rows):
    """All systems but one have as many FLOPs anyway, so the row would be the first one once more."""
    both = {"rows": ["iso_step", "iso_flop"]}
    results = [training(name, seed, **both) for name in ("a", "same") for seed in (1, 2)]
    progress = {"the same number of steps": {"a": (2, 2)}, "nearly the same number of FLOPs": {"far": (done, 5)}}
    own = record(results, progress, seeds=[1, 2], rows=["iso_step", "iso_flop"])
    assert list(by_row(own)) == rows
    assert list(by_row(record(results, seeds=[1, 2], rows=["iso_step", "iso_flop"]))) == ["iso_step", "iso_flop"]


def test_a_page_in_part_has_its_own_n_and_the_whole_family():
    """`far` has one seed, `open` none: the p of the others are corrected for all four contrasts."""
    progress = {"the same number of steps": {"a": (2, 2), "far": (1, 2), "open": (0, 2)}, "width 16": {"a": (0, 2)}}
    results = [training(name, seed) for name in ("a", "same", "little") for seed in (1, 2)] + [training("far", 1)]
    own = record(results, progress, seeds=[1, 2])
    found = {each.arm: each for each in contrasts.tests(own.protocol, own.losses())}
    assert found["far"].difference is found["open"].difference is None
    assert found["open"].verdict.startswith("not tested")
    tests = sorted(found[name].difference.p for name in ("same", "little"))
    assert min(found[name].p_holm for name in ("same", "little")) == pytest.approx(min(1.0, 4 * tests[0]))
    text = STUDY.filled_page(own)
    rest = "the same number of steps: far (1 of 2), open (0 of 2); width 16: a (0 of 2)."
    assert f"**Not finished.** 3 of 8 trainings are done; missing: {rest}" in text
    assert re.search(r"\| far \| 32 .* \| 1 \| 2\.2\d\d \| - \| 0\.2\d\d \| - \|", text)
    assert "| open | 32" not in text
    assert "Losses in" not in text, "one width is no law"
    assert [name for name, _ in STUDY.figures(own)] == ["loss", "efficiency", "speed"]


def test_searched_rates_alone_make_a_page():
    own = record([], {"search of rates": {"a": (3, 3)}, "width 32": {"a": (0, 5)}})
    text = STUDY.filled_page(own)
    assert "## Speed" not in text
    assert "None yet." in text
    assert "| far | 2.500 | 2.400 | 2.300 | 0.004 | no |" in text
    assert list(STUDY.figures(own)) == []
    assert set(files(own)) == {"contrasts.csv", "rates.csv"}


def test_the_check_of_a_rate_and_what_it_replaced_are_shown():
    text = STUDY.filled_page(record())
    assert "| a | 2.450 | 2.300 | 2.400 | 2.500 | 0.00141 | 0.000705 |" in text
    assert "Nothing is chosen" not in text
    assert "failed this check" not in text
    cut = record(check_rates=CORRECTING | {"arms": ["a"], "factors": [0.125, 0.25, 0.5, 1, 2]})
    assert "| 2.500 | 0.00141 | check not finished |" in STUDY.filled_page(cut)
    shown = STUDY.filled_page(record(check_rates={"arms": ["a"]}))
    assert "Nothing is chosen by this" in shown
    assert "| a | 2.450 | 2.300 | 2.400 | 2.500 | 0.000705 |" in shown
    before = [training("a", seed, learning_rate=1.41e-3, report_loss=2.75) for seed in (1, 2)]
    own = dataclasses.replace(record(), replaced=record(before).results)
    text = STUDY.filled_page(own)
    assert "failed this check. They are in no other table" in text
    assert "| a | 32 | 10 | 0.00141 | 2 | 2.750 |" in text
    assert len(files(own)["replaced.csv"].rows) == 2
    assert losses(own) == losses(record())


def test_the_law_is_fitted_for_each_seed():
    """loss = 2 - 0.1 log2(width / 32), a straight line; bent by what is added in the middle."""
    found = widths.law({w: {seed: loss_of("far", seed, w) for seed in SEEDS} for w in (16, 32, 64)})
    assert found.slope.mean == pytest.approx(0.1)
    assert found.slope.half == pytest.approx(0.0, abs=1e-9)
    assert found.bend.mean == pytest.approx(0.0, abs=1e-9)
    assert found.losses[64].n == 5
    bent = {w: {seed: 2.0 + 0.03 * (w == 32) - 0.01 * seed * math.log2(w) for seed in (1, 2, 3)} for w in (16, 32, 64)}
    found = widths.law(bent)
    assert found.slopes == pytest.approx({1: 0.01, 2: 0.02, 3: 0.03})
    assert found.bend.mean == pytest.approx(0.03)
    assert widths.law({16: bent[16], 64: bent[64]}).bend is None
    assert widths.law({16: bent[16]}) is widths.law({}) is widths.law({16: {1: 2.0}, 32: {2: 2.0}}) is None
    uneven = widths.law(bent | {64: {1: bent[64][1], 9: 0.0}})
    assert list(uneven.slopes) == [1], "seeds that not all widths have do not count"


def test_what_was_reached_when_the_time_of_the_reference_is_over():
    """`far` takes twice the time of a step, and is at 5 of 10 steps; `open` half of it, and has finished."""
    own = record()
    found = clock.at_time(own)
    assert (found["far"].steps, found["far"].share, found["open"].share) == (5.0, 0.5, 1.0)
    assert found["far"].loss.mean == pytest.approx(np.mean([loss_of("far", seed) for seed in SEEDS]) + 1.0)
    assert found["far"].difference.n == 5
    assert found["a"].difference is None
    late = [dataclasses.replace(r, curve=[(6, 4.0), (10, 3.0)]) if r.system == "far" else r for r in own.results]
    assert set(found) - set(clock.at_time(record(late))) == {"far"}, "nobody knows its loss after 5 steps"
    machines = {"a": "m", "far": "n"}
    elsewhere = [training(name, seed, machine=machine) for name, machine in machines.items() for seed in SEEDS]
    assert list(clock.at_time(record(elsewhere))) == ["a"], "times of two machines are not compared"


def test_times_are_those_on_one_machine():
    """Two of the five trainings of `a` ran elsewhere, twice as slow, and all of `far`, which have no times."""
    here = [training("a", seed) for seed in SEEDS[:3]] + [training("same", seed) for seed in SEEDS]
    there = [training("a", seed, machine="n", seconds_per_step=0.2) for seed in SEEDS[3:]]
    there += [training("far", seed, machine="n") for seed in SEEDS]
    own = record(there + here, targets=[2.5])
    text = STUDY.filled_page(own)
    assert own.timed_on == "m"
    assert "\n- Times are those on the machine of most trainings of a with equal" in text
    assert "steps (m), and missing" in text
    assert "from more than one machine (m; n)." in text
    assert "| a (iso_step) | 32 | 10 | 100 to 100 |  | 10, 1, 1e+10 |" in text
    assert "| far (iso_step) | 32 | 10 |  |  | 10, -, 1e+10 |" in text
    summary = files(own)["summary.csv"]
    seconds = {row[1]: row[summary.head.index("seconds_per_step")] for row in summary.rows}
    assert (seconds["a"], math.isnan(seconds["far"])) == (pytest.approx(0.1), True)
    assert "speed" in dict(STUDY.figures(own))
    assert record(there, targets=[2.5]).timed_on == "n"
    narrow = [training("a", seed, 16, machine="n") for seed in SEEDS]
    assert record(narrow + there + here, targets=[2.5]).timed_on == "m", "trainings of other widths do not count"


def test_times_of_a_clock_replace_those_of_the_trainings():
    """By the clock `far` takes a quarter longer than `a`, on whatever machine it was trained; `same` is not timed."""
    seconds = {"a-d32": [0.4, 0.5], "far-d32": [0.6, 0.5], "far-d16": [9.0]}
    results = [training(name, seed, machine=name) for name in ("a", "far", "same") for seed in SEEDS]
    own = dataclasses.replace(
        record(results, targets=[2.5], progress={"two": {"a": (1, 1)}}), clock=StepTimes("m2", 12, seconds)
    )
    found = clock.at_time(own)
    assert {name: (t.seconds, t.steps) for name, t in found.items()} == {"a": (0.4, 10.0), "far": (0.5, 8.0)}
    half_way = np.mean([loss_of("far", seed) for seed in SEEDS]) + 0.4  # from step 5, a nat above the last, to step 10
    assert found["far"].loss.mean == pytest.approx(half_way)
    ended = found["a"].loss.mean
    # In the first round `far` makes 6 2/3 steps, which are 2/3 of a nat above its last; in the second it ends.
    first, second = (half_way - 0.4 + above - ended for above in (2 / 3, 0.0))
    assert found["far"].rounds == pytest.approx((second, first))
    assert found["a"].rounds is None
    assert clock.at_time(dataclasses.replace(own, clock=StepTimes("m2", 12, {"far-d32": [0.5]}))) == {}
    text = STUDY.filled_page(own)
    assert f"| {second:.3f} to {first:.3f} |" in text
    assert "side by side on m2. In each of 2 rounds, every model makes 12 steps" in text
    assert "most trainings" not in text
    assert "did other work" not in text
    assert "| a (iso_step) | 32 | 10 | 400 to 500 |  | 10, 4, 1e+10 |" in text
    assert "| same (iso_step) | 32 | 10 |  |  | 10, -, 1e+10 |" in text
    assert "speed" in dict(STUDY.figures(own))


def test_the_clock_times_all_models_in_turn_and_keeps_what_it_finds(tmp_path, monkeypatch):
    """It makes no trainings, and a change of a model makes its times stale."""
    config, names = everything(clock="true"), []
    config.check()
    assert not config.trains("standard")
    own = _equal_steps(config, tmp_path)
    path = tmp_path / "kept" / "times.json"
    assert step_times(own, path, tmp_path, measures=False) is None
    monkeypatch.setattr(steps, "train", lambda recipe: names.append(recipe.raw["trainer"]["id"]))
    monkeypatch.setattr(steps, "read_training", lambda job: Training(job.seed, seconds_per_step=1.0 + len(names) // 3))
    found = step_times(own, path, tmp_path, measures=True)
    assert found.seconds == {"standard-d32": [1.0, 2.0, 2.0], "basis_2-d32": [1.0, 2.0, 3.0]}
    assert (found.rounds, found.of("basis_2", 32), found.of("basis_2", 16)) == (3, [1.0, 2.0, 3.0], [])
    assert [name.split("-")[0] for name in names] == ["standard", "basis_2"] * 3
    assert step_times(own, path, tmp_path, measures=True) == found
    assert len(names) == 6, "they were measured again"
    wider = everything(clock="true", **{"overrides.model.block.num_heads": "2"})
    assert step_times(_equal_steps(wider, tmp_path), path, tmp_path, measures=False) is None


@pytest.mark.slow
def test_the_times_of_the_clock_are_those_of_trainings(tmp_path):
    found = step_times(_equal_steps(everything(), tmp_path), tmp_path / "times.json", tmp_path, measures=True)
    assert all(0 < seconds < 60 for own in found.seconds.values() for seconds in own)
    assert not [*tmp_path.glob("*/standard*"), *tmp_path.glob("standard*")], "its runs are removed"


def _equal_steps(config: CompareConfig, folder: Path) -> list[Arm]:
    text = config.text.prepare(folder / "texts")
    return [arm for arm in arms(config, text, folder) if "iso_step" in arm.what.rows]


def test_tables_and_figures_come_from_the_record_alone():
    own = record()
    text = STUDY.filled_page(own)
    (_, _, table), *_ = losses(own)
    assert "p (Holm)" not in table.head, "the contrasts are the only family"
    assert "the only tests are those of the contrasts" in text
    assert f"2-grams counted in as much text reach {COUNTS['2']:.3f}" in text
    assert len(re.findall(r"^\| \w+ \| 5 \| 2.* \| no \|$", text, re.MULTILINE)) == 5
    assert "| same | 1.250 | 2.0" in text
    assert "Still at an edge" not in text
    assert "| far | 2.500 | 2.400 | 2.300 | 0.004 | no |" in text
    assert "## Losses in 3 widths" in text
    assert "## At the same wall-clock time" in text
    made = files(own)
    assert set(made) == {
        "table.tex",
        *(f"{n}.csv" for n in ("summary", "runs", "contrasts", "widths", "rates", "time")),
    }
    assert len(made["contrasts.csv"].rows) == 4
    assert "p_holm" not in made["summary.csv"].head
    assert [name for name, _ in STUDY.figures(own)] == ["loss", "efficiency", "speed", "widths"]
    assert missing({"one": {"a": (2, 2)}}) == ""


def test_many_systems_are_a_map_of_differences_while_training(monkeypatch):
    """Curves of more than six hide each other. Each cell is paired by seed."""
    found = [training(name, seed) for seed in SEEDS for name in SHIFTS]
    own = record([*found, training("a", 7, curve=[(5, 9.0), (10, 9.0)])])
    (_, curves), *_ = STUDY.figures(own)
    assert len(curves.axes[0].lines) > 5
    monkeypatch.setattr(figures, "_CURVES", 4)
    (_, figure), *_ = STUDY.figures(own)
    panel = figure.axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["same", "little", "far", "open"]
    mean = statistics.fmean([*(loss_of("a", seed) for seed in SEEDS), 9.0])
    assert [label.get_text() for label in panel.get_xticklabels()][1] == f"10\n{mean:.2f}"
    far = statistics.fmean(loss_of("far", seed) - loss_of("a", seed) for seed in SEEDS)
    assert panel.texts[5].get_text().startswith(f"{far:+.2f}\n±"), "a seed that only the reference has does not count"


def test_rows_with_different_numbers_of_seeds_have_the_same_columns():
    results = [training(name, seed) | {"rows": ["iso_step"]} for seed in SEEDS for name in SHIFTS]
    results += [training(name, seed) | {"rows": ["iso_parameter"]} for seed in SEEDS[:3] for name in SHIFTS]
    own = record(results, rows=["iso_step", "iso_parameter"])
    assert {tuple(table.head) for _, _, table in losses(own)} == {tuple(losses(own)[0][2].head)}
    text = files(own)["table.tex"]
    assert "At the same number of steps ($n$ = 5)" in text
    assert len({line.count("&") for line in text.splitlines() if "&" in line}) == 1


def test_machines_are_named_where_there_are_several():
    results = [training(name, seed) for seed in SEEDS for name in SHIFTS]
    assert "from another machine (m)." in STUDY.filled_page(record(results))  # than the one that draws the page
    drawn = record(results)
    here = Machine("m", 1, "0.1")
    for result in drawn.results:
        object.__setattr__(result, "machine", str(here))
    assert "The reported trainings are from" not in STUDY.filled_page(dataclasses.replace(drawn, machine=here))
    results[0]["machine"] = "another"
    assert "from more than one machine (another; m)" in STUDY.filled_page(record(results))


def test_what_is_true_of_three_widths_is_said_of_three():
    words = "which fit three points exactly"
    assert words in STUDY.filled_page(record())
    results = [training(name, seed, width) for width in (32, 16) for seed in SEEDS for name in SHIFTS]
    assert words not in STUDY.filled_page(record(results, widths=[16, 32]))


def test_a_text_is_read_by_tokens():
    own = record(known=4096, tokenizer="gpt2")  # 10 steps; tokens_per_step is that of the other tests
    share = own.protocol.steps * own.protocol.tokens_per_step / 4096
    assert f"They read the text {share:.2f} times" in STUDY.filled_page(own)


SMOKE = str(FOLDER / "compare" / "smoke_all.yaml")


def everything(**changes) -> CompareConfig:
    words = [word for key, value in changes.items() for word in (f"--{key}", value)]
    return parse(CompareConfig, ["--config_path", SMOKE, *words])[0]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("contrasts", '[["basis_3", "standard"]]', "`contrasts` has basis_3. Choices: standard, basis_2"),
        ("contrasts", '[["standard", "standard"]]', "no pair of two systems"),
        ("contrasts", '[["basis_2", "standard"], ["basis_2", "standard"]]', "or there twice"),
        ("contrasts", "[]", "`more_seeds` is for systems of `contrasts`"),
        ("more_seeds", "[1]", "`more_seeds` must be others"),
        ("learning_rates", "[0.001]", "for a grid that can grow at `search_width`"),
        ("rows", "[iso_flop]", "`rows` must have iso_step"),
        ("rows", "[iso_money]", "Choices: iso_step"),
        ("rows", "[iso_flop, iso_time]", "trainings with equal steps, so|`rows` must have iso_step"),
        ("more_seeds", "[7, 7]", "`more_seeds` has a seed twice"),
        ("widths", "[16, 32, 16]", "`widths` has a width twice"),
        ("learning_rates", "[0.001, 0.001, 0.002]", "has a rate twice"),
        ("learning_rates", "[-0.001, 0.002]", "learning_rates"),
        ("report_batches", "0", "report_batches"),
        ("overrides", '{"data": {"tokenizer": "byte", "shuffle": true}}', "`overrides.data` has shuffle, but a study"),
        ("check_rates", '{"arms": ["basis_3"]}', r"`check_rates\.arms` has basis_3"),
        ("check_rates", '{"arms": ["standard"], "factors": [1.0]}', "must be positive, 1 and others"),
        ("only", "[basis_3]", "`only` has basis_3"),
        ("published", '{"about": "x", "losses": {"nothing": 1.0}}', r"`published\.losses` has nothing"),
        ("arms", '{"standard": {}, "basis_2": {}}', "share the name standard"),
    ],
)
def test_what_cannot_be_said_is_refused_before_any_work(key, value, message):
    with pytest.raises(UserError, match=message):
        everything(**{key: value}).check()


def test_a_clock_is_of_all_models_at_equal_steps():
    with pytest.raises(UserError, match="side by side: leave out `only`"):
        everything(clock="true", only="[basis_2]").check()
    with pytest.raises(UserError, match="`clock` times the systems at equal steps"):
        everything(
            clock="true",
            rows="[iso_flop]",
            contrasts="[]",
            more_seeds="[]",
            widths="[]",
            check_rates="null",
            ngrams="null",
        ).check()


def test_so_is_a_margin_that_is_none_and_a_width_that_is_missing(tmp_path):
    for margin in ("0", "-0.1"):
        with pytest.raises(UserError, match="`margin` must be above 0"):
            everything(margin=margin)
    config = everything(widths="[16, 48]")
    config.check()
    with pytest.raises(UserError, match=r"`widths` is \[16, 48\].* \[32\]: add it"):
        arms(config, config.text.prepare(tmp_path), tmp_path)
    check = {"arms": ["standard", "basis_2"], "factors": [0.5, 1.0, 2.0]}
    config = everything(search_width="32", check_rates=json.dumps(check | {"corrects": True}))
    with pytest.raises(UserError, match="the width of standard, basis_2 is `search_width`, 32"):
        arms(config, config.text.prepare(tmp_path), tmp_path)
    config = everything(search_width="32", check_rates=json.dumps(check))
    assert arms(config, config.text.prepare(tmp_path), tmp_path), "a check that corrects nothing only shows losses"
    config = everything(arms='{"other": {"model": {"nonsense": 1}}}', contrasts="[]", more_seeds="[]")
    with pytest.raises(UserError, match=r"arms\.other: .*nonsense"):
        arms(config, config.text.prepare(tmp_path), tmp_path)


def test_overrides_of_the_command_line_are_plain_values():
    """They are part of recipes, which are hashed as JSON; and the text can be another one."""
    text = '{"type": "wikitext2", "folder": "f"}'
    config = everything(
        **{"overrides.trainer.num_train_steps": "7", "overrides.model.block.form": "split", "text": text}
    )
    assert config.overrides["trainer"] == {"num_train_steps": 7}
    assert type(config.overrides["trainer"]["num_train_steps"]) is int
    assert config.overrides["model"] == {"hidden_dim": 32, "max_seq_len": 32, "depth": {"steps": 2}} | {
        "block": {"form": "split"}
    }
    assert config.text == WikiText2("f")


def test_trainings_are_in_an_order_in_which_the_page_grows(tmp_path):
    config = everything(rows="[iso_flop, iso_step, iso_parameter]", widths="[16, 32, 48]")
    text = config.text.prepare(tmp_path)
    plan = Plan.of(config, text, tmp_path)
    stages = plan.stages()
    assert [*stages][:3] == ["the same number of steps", "width 16", "width 48"]
    assert [arm.what.system for arm in stages["the same number of steps"]] == ["standard", "basis_2"]
    assert sum(map(len, stages.values())) == len(plan.arms) == len({arm.label for arm in plan.arms})
    assert {arm.what.width for arm in plan.search} == {16}
    words = list(plan.estimate())
    assert words[0].startswith("search of rates: 4 trainings")
    assert words[-1].startswith("all: ")


def test_the_page_says_where_the_rates_of_the_widths_come_from():
    rule = "Nothing is extrapolated. Rates outside the width of the search are those of the rule"
    assert f"{rule}, corrected where its check fails.\n" in STUDY.filled_page(record())
    assert f"{rule}.\n" in STUDY.filled_page(record(check_rates=CORRECTING | {"arms": ["a"], "corrects": False}))
    assert "Nothing is extrapolated.\n" in STUDY.filled_page(record(search_width=None, check_rates=None))


def test_rates_are_transferred_by_the_rule(tmp_path):
    config = everything()
    text = config.text.prepare(tmp_path)
    own = arms(config, text, tmp_path)
    rates = transferred(config, own, {("standard", 16): 2e-3})
    assert rates == {("standard", 16): 2e-3, ("standard", 32): 0.00141}
    assert [arm.recipe.config.model.hidden_dim for arm in narrow(config, text, tmp_path)] == [16, 16]


def test_a_rate_whose_check_fails_is_corrected_in_all_widths_but_that_of_the_search(tmp_path):
    check = {"arms": ["standard"], "factors": [1.0, 2.0]}
    config = everything(widths="[16, 32, 48]", check_rates=json.dumps(check | {"corrects": True}))
    own = arms(config, config.text.prepare(tmp_path), tmp_path)
    rates = transferred(config, own, {("standard", 16): 8e-3})
    assert rates == {("standard", 16): 8e-3, ("standard", 32): 5.66e-3, ("standard", 48): 4.62e-3}
    jobs = checks(config, own, rates)
    assert {job.arm.group for job in jobs} == {("standard", 32)}
    assert [(job.rate, job.seed) for job in jobs] == [(5.66e-3, 0), (1.13e-2, 0)]
    near, far = {2.83e-3: 2.0, 5.66e-3: 2.0199}, {2.83e-3: 2.0, 5.66e-3: 2.0201}
    assert config.margin == 0.02
    assert (after_check(config, 5.66e-3, near), after_check(config, 5.66e-3, far)) == (5.66e-3, 2.83e-3)
    assert after_check(config, 5.66e-3, {2.83e-3: 2.0, 5.66e-3: math.inf}) == 2.83e-3
    assert corrected(config, own, rates, {("standard", 32): near}) == rates
    assert corrected(config, own, rates, {}) == rates, "a check that is not finished corrects nothing"
    half = {("standard", 16): 8e-3, ("standard", 32): 2.83e-3, ("standard", 48): 2.31e-3}
    assert corrected(config, own, rates, {("standard", 32): far}) == half
    assert corrected(everything(widths="[16, 32, 48]"), own, rates, {("standard", 32): far}) == rates, "not asked"


made: list[tuple[int, float, int, bool]] = []  # width, rate, seed, is_reported of each `Pretended` training
names: list[str] = []  # of these


class Pretended(Measure[Trained]):
    """Trainings whose best rate is 2e-3 at width 16, and a fourth of what the rule says at others."""

    def _read(self, job, group):
        best = 2e-3 if job.arm.what.width == 16 else 1.41e-3 / 4
        loss = 2.0 + abs(math.log2(job.rate / best))
        made.append((job.arm.what.width, job.rate, job.seed, job.is_reported))
        names.append(job.name)
        more = {"select_loss": loss, "report_loss": loss if job.is_reported else None, "curve": [(8, loss)]}
        return Trained(**vars(job.arm.what), seed=job.seed, learning_rate=job.rate, **more)


def test_rates_are_checked_before_anything_is_reported(tmp_path):
    """The grid of the checks grows, and what was reported earlier at the transferred rate is kept apart."""
    words = {"only": "[standard]", "learning_rates": "[0.001, 0.002, 0.004]", "beyond_grid": "2"}

    def carry_out(**more) -> Done:
        config = everything(**words, **more)
        made.clear()
        text = config.text.prepare(tmp_path / "texts")
        return Plan.of(config, text, tmp_path).carry_out(Pretended(Trained, config, tmp_path))

    before = carry_out(check_rates="null", seeds="[1, 2]", widths="[32]")
    assert [(r.learning_rate, r.seed) for r in before.results if r.width == 32] == [(1.41e-3, 1), (1.41e-3, 2)]
    check = json.dumps({"arms": ["standard"], "factors": [1.0, 2.0], "corrects": True})
    assert carry_out(check_rates=check, partial="true").results == [], "the check may still correct their rate"
    done = carry_out(check_rates=check)
    of_check = [one for one in made if one[0] == 32 and not one[3]]
    assert [rate for _, rate, *_ in of_check] == pytest.approx([1.41e-3, 2.82e-3, 0.705e-3, 0.3525e-3])
    assert made[: len(of_check)] == of_check, "nothing is reported before"
    rates = {(r.width, r.learning_rate) for r in done.results}
    assert rates == {(16, 2e-3), (32, of_check[-1][1])}
    assert [(r.width, r.learning_rate, r.seed) for r in done.replaced] == [(32, 1.41e-3, 1), (32, 1.41e-3, 2)]
    assert done.progress["check of the transfer"] == {"standard": (4, 4)}


@pytest.mark.parametrize("held", ["basis_2-d16-s8-lr0.001-seed0", "basis_2-d32-s8-lr0.00141-seed0"])
def test_what_other_processes_make_is_waited_for_last(tmp_path, monkeypatch, held):
    """Another process has a training of the search, or of the check: all that does not depend on it comes before."""
    check = {"arms": ["standard", "basis_2"], "factors": [1.0, 2.0], "corrects": True}
    config = everything(check_rates=json.dumps(check), learning_rates="[0.001, 0.002, 0.004]", beyond_grid="2")
    plan = Plan.of(config, config.text.prepare(tmp_path / "texts"), tmp_path)
    folder = tmp_path / "claims"
    folder.mkdir()
    with contextlib.ExitStack() as other:
        other.enter_context(locked(folder / f"{held}.lock", wait=False))
        monkeypatch.setattr(sharing.time, "sleep", lambda seconds: other.close())
        names.clear()
        done = plan.carry_out(Pretended(Trained, config, tmp_path))
    assert missing(done.progress) == ""
    assert len(names) == len({*names}), "nothing is made twice"
    before, after = names[: names.index(held)], names[names.index(held) :]
    assert [name for name in after if name.startswith("standard")] == []
    assert {f"standard-d{width}" for width in (16, 32)} == {n[:12] for n in before if n.endswith(("seed1", "seed2"))}
    assert any(name.startswith("basis_2") for name in before), "of its search"


@pytest.mark.slow
def test_smoke_in_parts_is_the_whole(tmp_path, monkeypatch):
    """One system, then the page of that, then the rest; and with the readings alone the same page again."""

    def run(**changes) -> Comparison:
        words = {"readings": str(tmp_path / "kept"), "run_dir": str(tmp_path / "runs"), **changes}
        return STUDY.carry_out(everything(**words))

    with pytest.raises(UserError, match="no training is done yet"):
        run(partial="true")
    one = run(only="[standard]")
    assert {r.system for r in one.results} == {"standard"}
    assert missing(one.progress)
    page = tmp_path / "runs" / "results" / "results.md"
    assert "**Not finished.**" in page.read_text()
    whole = run()
    assert missing(whole.progress) == ""
    assert len(whole.selection) >= 4
    assert len(whole.checks) == 2
    assert {r.width for r in whole.results} == {16, 32}
    assert {r.seed for r in whole.results} >= {1, 2}
    assert all(r.machine for r in whole.results)
    text = page.read_text()
    refuse_work(monkeypatch)
    again = run(partial="true", run_dir=str(tmp_path / "other"))
    assert again.results == whole.results
    other = (tmp_path / "other" / "results" / "results.md").read_text()
    where = [line for line in text.splitlines() if "Command:" in line]
    assert [a for a, b in zip(other.splitlines(), text.splitlines(), strict=True) if a != b and b not in where] == []
    STUDY.carry_out(OutputConfig(output=str(tmp_path / "other" / "results"), redraw=True))
    assert (tmp_path / "other" / "results" / "results.md").read_text() == other
