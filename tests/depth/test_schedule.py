"""Numbers of steps that are drawn or grow: what is refused, which stage a training step belongs to."""

import math

import pytest

from qkvflow.config import decode, encode
from qkvflow.depth import DepthConfig, StepGrowth, StepRange
from qkvflow.errors import UserError


def grow(**stages):
    return {"grow": {key.replace("_", "."): steps for key, steps in stages.items()}}


def test_growth_is_read_and_written():
    depth = decode(DepthConfig, {"steps": {"grow": {0.0: 3, 0.25: 6, 0.6: 12}}})
    assert isinstance(depth.steps, StepGrowth)
    assert depth.steps.values == (3, 6, 12)
    assert depth.reading_steps == 12
    assert [stage.steps for stage in depth.stages] == [3, 6, 12]
    assert decode(DepthConfig, encode(depth)) == depth
    assert hash(depth) == hash(decode(DepthConfig, encode(depth)))
    assert depth.on_grid().steps == 12
    assert isinstance(decode(DepthConfig, {"steps": {"min": 3, "max": 12}}).steps, StepRange)


@pytest.mark.parametrize("total", [5, 10, 60, 997, 1500])
def test_stages_begin_at_their_fractions(total):
    first = StepGrowth({"0.0": 3, "0.25": 6, "0.6": 12}).first_steps(total)
    assert first == tuple(math.ceil(total * numerator / 100) for numerator in (0, 25, 60))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"grow": {"0.1": 3, "0.5": 6}}, "must be 0.0"),
        ({"grow": {}}, "empty"),
        ({"grow": {"0.0": 3, "0.5": 6, "0.25": 12}}, "increase"),
        ({"grow": {"0.0": 3, "0.5": 6, "0.50": 12}}, "increase"),
        ({"grow": {"0.0": 3, "1.0": 6}}, "below 1"),
        ({"grow": {"0.0": 3, "nan": 6}}, "increase"),
        ({"grow": {"0.0": 0}}, "at least 1"),
        ({"grow": {"0.0": 3, "0.5": 1}}, "numbers of steps must increase, got 3, 1"),
        ({"grow": {"0.0": 3, "0.5": 3}}, "numbers of steps must increase"),
        ({"grow": {"soon": 3}}, "fractions of training"),
        ({"grow": {"0.0": True}}, "must be whole, got True"),
        ({"grow": {"0.0": "3"}}, "must be whole, got '3'"),
    ],
)
def test_growth_refusals(wrong, match):
    with pytest.raises(UserError, match=match):
        StepGrowth(**wrong)


@pytest.mark.parametrize(("total", "longer"), [(8, 16), (1500, 1501), (999_999, 3_000_001), (7, 90)])
def test_a_longer_training_keeps_the_steps_of_its_stages(total, longer):
    grow = StepGrowth({"0.0": 3, "0.3": 6, "0.6": 12})
    kept = grow.kept_in(total, longer)
    assert kept.first_steps(longer) == grow.first_steps(total)
    assert decode(StepGrowth, encode(kept)).first_steps(longer) == grow.first_steps(total)


def test_what_growth_and_kinetic_energy_cannot_go_with():
    steps = StepGrowth({"0.0": 3, "0.5": 6})
    for wrong, match in (
        ({"steps": steps, "solver": "tsit5", "rtol": 1e-3}, "choose it themselves"),
        ({"steps": steps, "step_size": "residual"}, "or grow"),
        ({"kinetic_weight": -1.0}, "at least 0"),
        ({"kinetic_weight": math.nan}, "finite"),
        ({"kinetic_weight": 1.0, "solver": "tsit5", "rtol": 1e-3}, "fixed grid"),
        ({"kinetic_weight": 1.0, "adjoint": "reversible"}, "checkpoint"),
    ):
        with pytest.raises(UserError, match=match):
            DepthConfig(**wrong)
    with pytest.raises(UserError, match="no training step"):
        steps.first_steps(1)
