"""The rival of growing depth: trainings of ordinary layers that begin with a few, and go on with copies of them."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from experiments.cost import Cost, cost_of
from experiments.jobs import Arm
from experiments.recipes import Recipe
from qkvflow.depth import StepGrowth
from qkvflow.errors import UserError
from qkvflow.weights import PerLayerConfig


def stacked(whole: Arm, grow: Mapping[str, int]) -> Arm:
    """The last stage of a training that begins with a few of the layers of `whole` and copies them.

    Every stage has its own optimizer state and warms up; the rate decays in the last one. The text begins again.

    Raises:
        UserError: the layers of a stage are not a multiple of those before, or not all at the end.
    """
    model, total = whole.recipe.config.model, whole.recipe.steps
    pairs = StepGrowth({str(key): layers for key, layers in grow.items()}).grow.pairs
    sizes = [layers for _, layers in pairs]
    is_multiple = all(after % before == 0 and after > before for before, after in itertools.pairwise(sizes))
    if not isinstance(model.weights, PerLayerConfig) or not is_multiple or sizes[-1] != len(model.plan.times):
        raise UserError(
            f"arms.{whole.what.arm}.stack: {dict(grow)} must be for `weights: {{type: per_layer}}`, each number a"
            " multiple of the one before, and the last one that of its layers"
        )
    borders = [*(round(begin * total) for begin, _ in pairs), total]
    rest = {key: value for key, value in whole.recipe.raw.items() if key != "model"}
    costs, arm = [], None
    for layers, (begin, end) in zip(sizes, itertools.pairwise(borders), strict=True):
        shallow = whole.recipe.but({"model": {"depth": {"steps": layers}}})
        costs.append(cost_of(shallow))
        recipe = shallow if arm is None else Recipe(rest | {"mode": {"type": "stack"}, "steps": layers})
        recipe = recipe.but({"trainer": {"num_train_steps": end - begin}})
        if end == total:
            return dataclasses.replace(whole, recipe=recipe, cost=_mean(costs, borders), base=arm)
        recipe, label = recipe.but({"optimizer": {"lr_schedule": "constant"}}), f"{whole.label}-{layers}"
        arm = dataclasses.replace(whole, label=label, recipe=recipe, cost=costs[-1], base=arm)
    raise AssertionError("the last stage ends with the training")


def _mean(costs: Sequence[Cost], borders: Sequence[int]) -> Cost:
    """The cost of a mean step of stages between these steps."""
    total = borders[-1]
    shares = [(end - begin) / total for begin, end in itertools.pairwise(borders)]
    flops, evaluations = (
        sum(share * getattr(cost, key) for share, cost in zip(shares, costs, strict=True))
        for key in ("flops", "evaluations")
    )
    stages = [(begin / total, cost.flops) for begin, cost in zip(borders, costs, strict=False)]
    return dataclasses.replace(costs[-1], flops=flops, evaluations=evaluations, stages=stages)
