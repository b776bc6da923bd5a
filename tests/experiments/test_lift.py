"""The study of lifted models: which layers stay, what is made, and that it is made once."""

import dataclasses

import jax
import numpy as np
import pytest
from support.models import build, random_tokens, small_config
from support.studies import smoke

from experiments.lift.__main__ import STUDY
from experiments.lift.plan import KINDS, Model, dropped, healed, rows, trained
from experiments.recipes import merged
from qkvflow.blocks import Inputs
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.runs.config import FinetuneConfig


def test_layers_at_equal_distances_stay():
    assert rows(12, 12) == list(range(12))
    assert rows(12, 3) == [2, 6, 10]
    assert rows(12, 1) == [6]
    assert rows(4, 2) == [1, 3]


def test_a_model_without_some_layers():
    """The layers that stay are applied one after the other, as they were."""
    model = build(small_config("per_layer", "sequential", DepthConfig(steps=4, step_size="residual")))
    tokens = random_tokens()
    same = dropped(model, 4)
    np.testing.assert_array_equal(same(tokens).array, model(tokens).array)
    shallow = dropped(model, 2)
    x = model.embeddings(tokens)
    for k in (1, 3):
        x = x + model.transformer.flow.increment(k, x, Inputs.of())
    expected = model.transformer.norm(x).array
    found = shallow.activations(tokens).rearrange(("batch", "position", "embed")).array
    np.testing.assert_allclose(found, jax.numpy.reshape(expected, found.shape), rtol=1e-5, atol=1e-5)


def test_everything_is_healed_at_every_k(tmp_path):
    config = smoke(STUDY)
    base = trained(config, config.text.prepare(tmp_path / "texts"), tmp_path)
    jobs = healed(config, base, 1, tmp_path)
    assert [job.arm.what for job in jobs] == [Model(kind, k) for k in config.dims for kind in KINDS]
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        assert isinstance(job.recipe.config, FinetuneConfig)
        assert job.recipe.config.mode.get_choice_name(type(job.recipe.config.mode)) == (
            "full" if job.arm.what.kind == "dropped" else "flow"
        )
        assert job.arm.cost.parameters < base.cost.parameters
    flow, layers = (next(j.arm.cost for j in jobs if j.arm.what == Model(kind, 1)) for kind in ("aligned", "dropped"))
    assert flow.parameters == layers.parameters
    assert (flow.evaluations, layers.evaluations) == (4, 1)


def test_what_cannot_be_made_is_refused():
    for changes, message in (
        ({"dims": [4]}, "below the 4 layers"),
        ({"dims": []}, "`dims` is empty"),
        ({"train": {"model": {"type": "gpt2"}}}, "`train` must have `model.depth.steps`"),
        ({"dims": [0]}, r"`dims\[0\]` must be at least 1"),
        ({"learning_rates": [1e-3, 2e-3]}, "learning_rates"),
    ):
        with pytest.raises(UserError, match=message):
            smoke(STUDY, **changes).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"basis": "waves"}, "waves"),
        ({"train": {"model": {"weights": {"type": "constant"}, "depth": {"step_size": "uniform"}}}}, "already a flow"),
        ({"heal": {"trainer": {"num_train_step": 3}}}, "num_train_step"),
    ],
)
def test_what_cannot_be_made_is_refused_before_any_training(tmp_path, changes, message):
    config = smoke(STUDY, run_dir=str(tmp_path / "runs"))
    for key, value in changes.items():
        setattr(config, key, merged(getattr(config, key), value) if isinstance(value, dict) else value)
    with pytest.raises(UserError, match=message):
        STUDY.carry_out(config)
    assert not list((tmp_path / "runs").glob("trained-*"))


def test_another_basis_or_another_base_starts_from_other_runs(tmp_path):
    """And what was measured of the former is not replaced."""
    config = smoke(STUDY)
    text = config.text.prepare(tmp_path / "texts")

    def starts(config):
        return {job.recipe.raw["run"] for job in healed(config, trained(config, text, tmp_path), 1, tmp_path)}

    first = starts(config)
    assert not first & starts(dataclasses.replace(config, basis="chebyshev"))
    faster = merged(config.train, {"optimizer": {"learning_rate": 1e-2}})
    assert not first & starts(dataclasses.replace(config, train=faster))


@pytest.mark.slow
def test_smoke_and_again(tmp_path, capsys):
    """All trainings, and a second start that makes none."""
    config = smoke(STUDY, run_dir=str(tmp_path / "runs"))
    first = STUDY.carry_out(config)
    assert len(first.results) == 2 * (1 + 2 * len(KINDS))
    assert all(r.before is not None and r.causal_at for r in first.results if r.kind != "trained")
    page = capsys.readouterr().out
    again = STUDY.carry_out(config)
    assert again.results == first.results
    assert capsys.readouterr().out == page
    # On another machine, which has the measurements but not all, and no runs.
    (lost,) = (tmp_path / "runs" / "readings").glob("dropped_1-*-seed1.json")
    lost.unlink()
    elsewhere = smoke(STUDY, run_dir=str(tmp_path / "elsewhere"), readings=str(tmp_path / "runs" / "readings"))
    assert STUDY.carry_out(elsewhere).results == [
        dataclasses.replace(r, seconds_per_step=pytest.approx(r.seconds_per_step, rel=1e3)) for r in first.results
    ]
