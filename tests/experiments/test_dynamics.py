"""The study of inner dynamics: what is read off spectra and scores, against numbers written out; its page."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from support.models import build, random_tokens, small_config
from support.studies import ABOUT, ORIGIN, refuse_work, smoke

from experiments.dynamics import readings
from experiments.dynamics.__main__ import STUDY
from experiments.dynamics.plan import SYSTEMS, arms
from experiments.dynamics.readings import (
    FAMILIES,
    PROPERTIES,
    SCORES,
    Mark,
    Spectra,
    _correlation,
    marks,
    properties,
    scores,
    spectra,
)
from experiments.dynamics.report import Dynamics, mark_contrasts, spectral_contrasts
from experiments.records import read
from qkvflow.analysis import lyapunov
from qkvflow.errors import UserError


def test_what_is_read_off_spectra():
    """Sizes that double halfway grow by one octave; real parts and signs are counted."""
    values = np.array([[[1j, -1.0], [1.0, -1j]]] * 2 + [[[2.0, 2j], [2.0, -2.0]]] * 2)  # [time, heads, head_size]
    found = spectra(values, (0.25, 0.5, 0.75, 1.0), 7, "ov", "ours")
    assert (found.step, found.size, found.real) == (7, [1.0, 1.0, 2.0, 2.0], [0.5, 0.5, 1.5, 1.5])
    assert found.growth == 1.0
    assert found.real_growth == pytest.approx(np.log2(3.0))
    assert found.late_positive == 0.5
    assert found.positive[0] == 0.25


def test_scores_and_properties():
    """The scores are those of the analysis; surprise is the loss; the first and the last token are left out."""
    model, text = build(small_config()), np.asarray(random_tokens(batch=1, length=6).array[0])
    by_score = scores(model, is_flow=True)
    assert tuple(by_score) == SCORES
    np.testing.assert_allclose(by_score["coupled"](text), lyapunov.token_map(model, text).array[-1])
    exponents = lyapunov.token_exponents(model, text).sum(0).max(-1)
    np.testing.assert_allclose(by_score["paper"](text), exponents)
    assert "official" not in scores(model, is_flow=False)
    known = properties(model, text, np.arange(64.0))
    assert tuple(known) == tuple(PROPERTIES)
    np.testing.assert_array_equal(known["rarity"], text)
    assert np.isnan(known["surprise"][0])
    assert (known["surprise"][1:] > 0).all()
    order = np.array([9.0, 1.0, 2.0, 3.0, 4.0, -9.0])
    assert _correlation(order, order**3) == 1.0
    assert _correlation(order, -order) == -1.0
    assert _correlation(order, np.ones(6)) == 0.0


def test_each_sample_is_scored_with_its_model_and_its_tokens(monkeypatch):
    """A score that is the token itself, of the trained model, and its negative of the new one."""

    def by_token(model, is_flow):
        return {"paper": lambda text: text if model == "trained" else -text}

    monkeypatch.setattr(readings, "scores", by_token)
    monkeypatch.setattr(readings, "properties", lambda model, text, rarity: {name: text for name in PROPERTIES})
    monkeypatch.setattr(readings, "_correlation", lambda score, known: float(score[0] * known[0] + 100 * known[1]))
    texts = np.array([[3, 5, 7, 9]])
    found = {m.sample: m.correlation for m in marks("trained", "new", texts, np.ones(10), is_flow=True, seed=0)}
    shuffled = np.random.default_rng(0).permutation(texts[0])
    assert found["text"] == 3 * 3 + 100 * 5
    assert found["untrained"] == -3 * 3 + 100 * 5
    assert found["shuffled"] == shuffled[0] ** 2 + 100 * shuffled[1]


def made_up() -> Dynamics:
    """Two seeds; trained flows grow by an octave, layers do not; scores follow nearness in texts alone."""
    config = smoke(STUDY)
    protocol = config.rules() | ABOUT
    protocol |= {"flow_steps": 2, "num_train_steps": 6, "parameters": {"flow": 10, "layers": 20}, "optimizer": "o"}
    results = []
    for seed, system in itertools.product(config.seeds, ("flow", "layers")):
        grows = 2.0 if system == "flow" else 1.0
        own = [
            Spectra(
                step, family, reading, [0.5, 1.0], [1.0, grows if step else 1.0], [0.5, 0.5], [0.5, 0.5 + 0.01 * seed]
            )
            for family in FAMILIES
            for step in (0, 3, 6)
            for reading in (("ours", "official") if system == "flow" and step != 3 else ("ours",))
        ]
        marks = [
            Mark(score, sample, name, 0.5 + 0.1 * seed if (sample, name) == ("text", "nearness") else 0.01 * seed)
            for score in (SCORES if system == "flow" else SCORES[:2])
            for sample in ("text", "shuffled", "untrained")
            for name in PROPERTIES
        ]
        results.append({"seed": seed, "system": system, "report_loss": 2.0 + seed / 10, "spectra": own, "marks": marks})
    plain = [{**r, "spectra": [vars(s) for s in r["spectra"]], "marks": [vars(m) for m in r["marks"]]} for r in results]
    return read(Dynamics, {"protocol": protocol, "results": plain, **ORIGIN})


def test_tables_say_what_the_record_says():
    record = made_up()
    found = spectral_contrasts(record, lambda s: s.growth)
    assert found["flow", "qk", "trained"].mean.mean == 1.0
    assert found["flow", "qk", "trained"].difference.mean == 1.0
    assert found["layers", "ov", "trained"].difference.mean == 0.0
    assert found["flow", "qk", "untrained"].difference is None
    marks = mark_contrasts(record)
    assert marks["flow", "paper", "nearness", "text"].mean.mean == pytest.approx(0.65)
    assert marks["layers", "coupled", "nearness", "shuffled"].difference.mean == pytest.approx(-0.635)
    assert ("layers", "official", "nearness", "text") not in marks
    page = STUDY.filled_page(record)
    assert "| flow | QK | 1.000 ± 0.000 | 0.000 ± 0.000 |" in page
    assert f"layers: {SYSTEMS['layers']}, 20 parameters" in page
    tables = STUDY.files(record)
    assert len(tables["marks.csv"].rows) == 2 * 5 * 3 * 3
    assert {"system", "seed", "step", "matrix", "reading", "t", "size", "real", "positive"} == set(
        tables["spectra.csv"].head
    )
    names = [name for name, _ in STUDY.figures(record)]
    assert names == ["spectra", "over_training"]


def test_arms_and_refusals(tmp_path):
    config = smoke(STUDY)
    text = config.text.prepare(tmp_path / "texts")
    flow, layers = arms(config, text, tmp_path)
    assert (flow.label, layers.label) == ("flow", "layers")
    ordinary = layers.recipe.config.model
    assert (ordinary.depth.steps, ordinary.depth.step_size, ordinary.block.form) == (2, "residual", "sequential")
    assert flow.recipe.config.trainer.checkpointer.keep == [{"every": 3}]
    for changes, message in (
        ({"overrides": {"model": {"weights": {"type": "per_layer"}}}}, "functions of time"),
        ({"overrides": {"model": {"depth": {"solver": "rk4"}}}}, "with Euler on a fixed grid"),
        ({"overrides": {"model": {"depth": {"steps": {"grow": {0.0: 1, 0.5: 2}}}}}}, "that does not grow"),
        ({"overrides": {"model": {"depth": {"steps": 2, "step_size": "residual"}}}}, "steps of length 1/L"),
        ({"checkpoints": 999}, "`checkpoints` is 999, of 6 steps"),
        ({"texts": 999}, "`texts` is 999 .* one batch of"),
        ({"length": 999}, "`length` 999, but"),
    ):
        with pytest.raises(UserError, match=message):
            arms(dataclasses.replace(config, **changes), text, tmp_path)
    short = dataclasses.replace(text, folder=tmp_path / "short")
    short.folder.mkdir()
    for part in ("train", "select"):
        Path(short.file(part)).write_text(text.read(part))
    Path(short.file("report")).write_text(text.read("report")[: flow.recipe.config.Pos.size])
    with pytest.raises(UserError, match="has 1 sequences of"):
        arms(config, short, tmp_path)
    with pytest.raises(UserError, match="a configuration to begin from is missing"):
        arms(dataclasses.replace(config, base=None), text, tmp_path)
    with pytest.raises(UserError, match="`length` must be at least 5"):
        smoke(STUDY, length=4).check()


@pytest.mark.slow
def test_smoke(tmp_path, monkeypatch):
    """All of it, and again without any work."""
    config = smoke(STUDY, run_dir=str(tmp_path / "runs"))
    record = STUDY.carry_out(config)
    assert len(record.results) == 4
    flow = record.of(system="flow")[0]
    assert {s.step for s in flow.spectra} >= {0, 6}
    assert all(-1.0 <= m.correlation <= 1.0 for r in record.results for m in r.marks)
    assert flow.spectrum("qk", 6).size != flow.spectrum("qk", 0).size
    for name in ("results.md", "spectra.csv", "marks.csv", "spectra.png", "over_training.png"):
        assert (tmp_path / "runs" / "results" / name).stat().st_size > 200
    refuse_work(monkeypatch)
    assert STUDY.carry_out(config).results == record.results
