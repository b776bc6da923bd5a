"""The comparison: equal where it says so, blind to the text it reports on, the same again after being killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import haliax as hax
import jax
import numpy as np
import pytest
import yaml

from experiments.causality import check_causality
from experiments.compare import figures, tables
from experiments.compare.__main__ import SMOKE, main
from experiments.compare.config import CompareConfig
from experiments.compare.plan import variants
from experiments.compare.summary import lines
from experiments.cost import width_with
from experiments.leak.__main__ import Vocab, draw
from experiments.leak.model import Model
from experiments.rates import choose_rates, job, reported_jobs, selection_jobs
from experiments.statistics import holm, paired_test
from experiments.study import arguments
from experiments.systems import merged, system
from experiments.text_config import Builtin, HuggingFace
from experiments.texts import PARTS, Text, files
from qkvflow.cli import parse
from qkvflow.config import decode
from qkvflow.errors import UserError
from qkvflow.runs.config import TrainConfig
from qkvflow.training import session

ROOT = Path(__file__).parents[2]


def smoke(**changes) -> CompareConfig:
    words = [word for key, value in changes.items() for word in (f"--{key}", json.dumps(value))]
    return parse(CompareConfig, ["--config_path", str(SMOKE), *words])[0]


def made_up_record(seeds=(1, 2, 3)) -> dict:
    """As `results.json`: losses 2.0 for the reference and 2.1 for the other, plus a part that seeds share."""
    cost = {"parameters": 1e6, "materialised": 1e6, "evaluations": 6, "flops": 1e9, "tokens": 512, "memory": 2**20}
    results = [
        {
            "system": name,
            "rows": ["iso_step", "iso_flop"],
            "width": 32,
            "steps": 10,
            "seed": seed,
            "learning_rate": 1e-3,
            "curve": [[5, 3.0], [10, base + 0.1 * seed]],
            "select_loss": base + 0.1 * seed,
            "seconds_per_step": 0.1,
            "causal_at": [1, 32, 63],
            "report_loss": base + 0.1 * seed + 0.01 * (seed == 3) * (name == "b_c"),
        }
        for seed in seeds
        for name, base in (("a", 2.0), ("b_c", 2.1))
    ]
    parts = {"train": "one", "select": "two", "report": "three"}
    protocol = {
        "text": "t",
        "parts": parts,
        "bytes": dict.fromkeys(parts, 10),
        "tokenizer": "byte",
        "systems": {"a": "a.yaml", "b_c": "b.yaml"},
        "reference": "a",
        "rows": ["iso_step", "iso_flop"],
        "seeds": list(seeds),
        "learning_rates": [1e-3],
        "selection_seeds": [0],
        "steps": 10,
        "tokens_per_step": 512,
        "select_batches": None,
        "report_batches": None,
        "counts": {"1": 3.25, "2": 2.75},
        "targets": [2.25, 1.0],
    }
    costs = {"a-d32-s10": cost, "b_c-d32-s10": cost}
    machine = {"device": "d", "cores": 2, "jax": "0"}
    record = {"protocol": protocol, "costs": costs, "results": results, "selection": [], "machine": machine}
    return json.loads(json.dumps(record | {"date": "2026-01-01", "command": "c"}))


def test_tables_come_from_the_json_alone(tmp_path):
    record = made_up_record()
    reference, other = (line for line in lines(record) if line.row == "iso_step")
    assert reference.difference is None
    assert reference.loss.mean == pytest.approx(2.2)
    losses = [{r["seed"]: r["report_loss"] for r in record["results"] if r["system"] == name} for name in ("b_c", "a")]
    assert other.test == paired_test(*losses)
    assert other.p_holm == holm([other.test.p])[0]
    reached, never = other.reached
    assert (reached.n, reached.steps, reached.seconds) == (1, 10, pytest.approx(1.0))  # of seeds 1, 2, 3 only the first
    assert never.n == 0
    text, tex = tables.markdown(record), tables.latex(record)
    assert "not reached" in text
    assert "10, 1, 1e+10 (1 of 3 seeds)" in text
    assert text.count("| b_c | 32 |") == 2
    assert r"b\_c & 32" in tex
    assert tex.count("&") == (len(tables.LOSS) - 1) * 5
    assert tables._latex("to 5% of a_b") == r"to 5\% of a\_b"
    assert re.search(r"(?<!\\)[%#_]", tex) is None, "LaTeX takes it for a comment, or worse"
    assert tex.count("{") == tex.count("}")
    tables.write_csv(record, tmp_path / "summary.csv", tmp_path / "runs.csv")
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 1 + 4
    assert len((tmp_path / "runs.csv").read_text().splitlines()) == 1 + 6


@pytest.mark.slow
def test_figures_come_from_the_json_alone(tmp_path):
    figures.draw(made_up_record(), tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == ["efficiency", "loss", "memory", "speed"]


@pytest.mark.slow
def test_a_model_that_sees_the_future_is_refused():
    tokens, key = draw(jax.random.PRNGKey(0), 2), jax.random.PRNGKey(1)
    models = {leaks: Model.init(Vocab, leaks=leaks, width=16, heads=2, layers=1, key=key) for leaks in (True, False)}
    assert check_causality(models[False], tokens, "causal") == [1, 4, 7]
    with pytest.raises(UserError, match="leaky sees the future: token 1"):
        check_causality(models[True], tokens, "leaky")
    with pytest.raises(UserError, match="does not hear its input"):
        check_causality(lambda tokens: hax.zeros((*tokens.axes, Vocab)), tokens, "deaf")


def test_what_cannot_be_compared_is_refused(tmp_path):
    for changes, message in (
        ({"reference": "nothing"}, "not among `systems`"),
        ({"rows": ["iso_nothing"]}, "Choices: iso_step"),
        ({"seeds": [1]}, "at least two"),
        ({"learning_rates": [1e-3, 1e-2], "selection_seeds": [1]}, "must be others than `seeds`"),
    ):
        with pytest.raises(UserError, match=message):
            smoke(**changes).check()
    with pytest.raises(UserError, match=r"cannot be read: .*--text\.folder DIR"):
        smoke(text={"type": "wikitext2", "folder": str(tmp_path)}).text.prepare(tmp_path)
    with pytest.raises(UserError, match=r"there are no results .* --output"):
        main(smoke(redraw=True, run_dir=str(tmp_path)))
    with pytest.raises(UserError, match="nothing to compare"):
        main(CompareConfig())
    assert parse(CompareConfig, arguments(["--smoke", "--seeds", "[3, 4]"], SMOKE))[0] == smoke(seeds=[3, 4])
    for name in ("train", "select"):
        (tmp_path / name).write_text("the same\n")
    (tmp_path / "report").write_text("other\n")
    with pytest.raises(UserError, match="must differ"):
        files("mine", *(str(tmp_path / name) for name in ("train", "select", "report")), tmp_path)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    config = smoke(learning_rates=[1e-3, 1e-2])
    return config, variants(config, config.text.prepare(folder / "texts"), folder)


@pytest.mark.slow
def test_rows_are_equal_in_what_they_say(planned):
    _, found = planned
    reference = found[0]
    assert reference.rows == ("iso_step", "iso_flop", "iso_parameter")
    by_row = {row: {v.system: v for v in found if row in v.rows} for row in reference.rows}
    assert {len(systems) for systems in by_row.values()} == {6}
    assert {v.steps for v in by_row["iso_step"].values()} == {reference.steps}
    for v in by_row["iso_flop"].values():
        # Either to the nearest step, or within the 5 % for which no other number of steps is trained.
        off = 0.053 if v.steps == reference.steps else 0.5 / v.steps + 1e-9
        assert v.steps * v.cost.flops == pytest.approx(reference.steps * reference.cost.flops, rel=off)
    labels = {row: [v.label for v in systems.values()] for row, systems in by_row.items()}
    assert len(set(labels["iso_flop"]) - set(labels["iso_step"])) >= 2  # models of quite another price
    for v in by_row["iso_parameter"].values():
        assert v.cost.parameters == pytest.approx(reference.cost.parameters, rel=0.3)  # a step in width is much here
    assert len({v.label for v in found}) == len(found)


@pytest.mark.parametrize("path", sorted(SMOKE.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_comparison_can_be(path, tmp_path):
    """Each system on another text than that of the comparison, which may not be here."""
    config = parse(CompareConfig, ["--config_path", str(path)])[0]
    config.check()
    assert set(config.text.parts) == set(PARTS)
    text = Builtin().prepare(tmp_path / "texts")
    for file in config.systems.values():
        assert system(file, config.overrides, text, tmp_path, config.select_batches)["model"]["hidden_dim"] > 0


@pytest.mark.parametrize(("wanted", "width"), [(24_000, 16), (50_000, 24), (35_000, 20)])
def test_the_nearest_width(wanted, width):
    """Odd sizes of heads only where even ones are far away (here 20 = 4 heads of 5)."""
    raw = smoke().systems["standard"]
    raw = merged(yaml.safe_load(Path(raw).read_text()), {"model": {"max_seq_len": 16, "depth": {"steps": 6}}})
    assert width_with(raw, wanted) == width


@pytest.mark.slow
def test_learning_rates_are_chosen_apart_from_what_is_reported(planned):
    config, found = planned
    search = selection_jobs(config, found)
    assert {one.seed for one in search}.isdisjoint(config.seeds)
    assert not any(one.is_reported for one in search)
    losses = [abs(one.rate - (1e-2 if one.variant.system == "neuralode" else 1e-3)) for one in search]
    chosen = choose_rates(search, losses)
    reported = reported_jobs(config, found, chosen)
    assert all(one.rate == (1e-2 if one.variant.system == "neuralode" else 1e-3) for one in reported)
    assert len({one.name for one in search + reported}) == len(search) + len(reported)
    for one in search + reported:
        assert "report.txt" not in json.dumps(one.config)


@pytest.mark.slow
def test_the_order_of_the_text_depends_on_the_seed_alone(planned, monkeypatch):
    """The first batches that train_lm hands to each model, taken where it hands them."""
    _, found = planned
    seen = {}

    class Enough(Exception):
        pass

    def capture(run, trainer, Pos, key, opened=session.open_corpus):
        corpus = opened(run, trainer, Pos, key)
        sequences = [corpus.train.as_sync_dataset()[i] for i in range(24)]
        seen[current] = np.stack([s.tokens.array if hasattr(s.tokens, "array") else s.tokens for s in sequences])
        raise Enough

    monkeypatch.setattr(session, "open_corpus", capture)
    for variant in (v for v in found if "iso_step" in v.rows):
        for seed in (1, 2):
            current = (variant.system, seed)
            with pytest.raises(Enough):
                session.train_run(decode(TrainConfig, job(variant, seed, 1e-3, True).config), lambda run: None)
    assert len(seen) == 12
    for name, seed in seen:
        np.testing.assert_array_equal(seen[name, seed], seen["standard", seed])
    assert not np.array_equal(seen["standard", 1], seen["standard", 2])


@pytest.mark.slow
def test_killed_half_way_it_comes_to_the_same_table(tmp_path):
    """And the same seed gives the same losses, bit for bit: both experiments are made from nothing."""
    settings = yaml.safe_load(SMOKE.read_text())
    settings["systems"] = {"standard": settings["systems"]["standard"]}
    settings |= {"rows": ["iso_step"], "learning_rates": [1e-3, 1e-2], "evaluations": 2}
    settings["overrides"]["trainer"]["num_train_steps"] = 8
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(settings))

    def start(name: str) -> subprocess.Popen:
        words = ["-m", "experiments.compare", "--config", str(file), "--run_dir", str(tmp_path / name)]
        return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})

    def lines_of(name: str, file: str) -> int:
        return sum(len(path.read_text().splitlines()) for path in (tmp_path / name).glob(f"*/{file}"))

    assert start("whole").wait() == 0
    killed = start("killed")
    # The first training has been read, the second is under way.
    while killed.poll() is None:
        if lines_of("killed", "compare.json") >= 1 and lines_of("killed", "metrics.jsonl") >= 8 + 3:
            break
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert lines_of("killed", "compare.json") < 4
    assert start("killed").wait() == 0
    records = [json.loads((tmp_path / name / "results" / "results.json").read_text()) for name in ("whole", "killed")]
    assert tables.losses(records[0]) == tables.losses(records[1])
    for first, second in zip(*(r["results"] + r["selection"] for r in records), strict=True):
        for key in ("system", "seed", "learning_rate", "curve", "select_loss"):
            assert first[key] == second[key]
        assert first.get("report_loss") == second.get("report_loss")


def test_a_data_set_of_the_hub_is_fetched_once(tmp_path, monkeypatch):
    """A folder that `datasets` reads stands for the hub."""
    source = tmp_path / "some_set"
    source.mkdir()
    for split in ("train", "validation", "test"):
        lines = [json.dumps({"page": f"{split}, page {i}\n"}) for i in range(3)]
        (source / f"{split}.jsonl").write_text("\n".join(lines))
    config = HuggingFace(id=str(source), text_key="page")
    text = config.prepare(tmp_path / "texts")
    for part, split in (("train", "train"), ("select", "validation"), ("report", "test")):
        assert Path(text.file(part)).read_text() == "\n".join(f"{split}, page {i}\n" for i in range(3))
    with pytest.raises(UserError, match=r"no text 'text' \(`text_key`\); keys: page"):
        HuggingFace(id=str(source)).prepare(tmp_path / "others")
    with pytest.raises(UserError, match="must differ, but two of train, train and test"):
        HuggingFace(id=str(source), text_key="page", select="train").prepare(tmp_path / "others")
    monkeypatch.setattr(HuggingFace, "_split", lambda *_: pytest.fail("fetched again"))
    assert config.prepare(tmp_path / "texts").sizes() == text.sizes()


def test_text_is_written_once(tmp_path):
    for name in ("train", "select", "report"):
        (tmp_path / name).write_text(f"{name}\n")
    sources = [str(tmp_path / name) for name in ("train", "select", "report")]
    text: Text = files("mine", *sources, tmp_path / "texts")
    before = os.stat(text.file("train")).st_mtime_ns
    files("mine", *sources, tmp_path / "texts")
    assert os.stat(text.file("train")).st_mtime_ns == before
    assert text.sizes() == {"train": 6, "select": 7, "report": 7}
