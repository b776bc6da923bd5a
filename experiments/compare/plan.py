"""The plan of the comparison: its YAML, and its systems in the sizes and lengths that the rows require."""

from dataclasses import dataclass, field
from pathlib import Path

from experiments.config import RatesConfig, check_among, check_reference
from experiments.cost import Cost, cost_of, width_with
from experiments.jobs import Arm
from experiments.recipes import Recipe
from experiments.texts import Text

# A row of equal FLOPs has no separate training if that would change the number of steps by a smaller fraction.
SAME_FLOPS = 0.05
ROWS = {
    "iso_step": "the same number of steps",
    "iso_flop": "nearly the same number of FLOPs",
    "iso_parameter": "nearly the same number of trained parameters",
}


@dataclass
class CompareConfig(RatesConfig):
    """In addition to `RatesConfig`; a learning rate is selected for each system in each size:

    Attributes:
        systems: name -> configuration of train_lm; its data is replaced by `text`.
        reference: the system with which the others are compared, also in FLOPs and parameters.
        rows: of ROWS.
        targets: losses on `select`; time and FLOPs until each is first reached are reported.
    """

    systems: dict[str, str] = field(default_factory=dict)
    reference: str = "standard"
    rows: list[str] = field(default_factory=lambda: list(ROWS))
    targets: list[float] = field(default_factory=list)

    def check(self) -> None:
        super().check()
        check_reference("`reference`", self.reference, self.systems, "`systems`", least=1)
        check_among("rows", self.rows, ROWS)


@dataclass(frozen=True)
class Variant:
    """A system in one size, trained for one number of steps. rows: the rows that contain it."""

    system: str
    rows: list[str]
    width: int
    steps: int


def arms(config: CompareConfig, text: Text, run_dir: Path) -> list[Arm]:
    """All variants, the reference first; the same model with the same number of steps occurs once.

    Raises:
        UserError: a configuration cannot be read, or the costs of a model are unknown.
    """
    given = {name: config.recipe(file, text, run_dir) for name, file in config.systems.items()}
    reference = given[config.reference]
    cost, found = cost_of(reference), {}
    for row in config.rows:
        for name, recipe in ({config.reference: reference} | given).items():
            own = _equal(row, recipe, reference.steps, cost).evaluated(config.evaluations)
            width = own.raw["model"]["hidden_dim"]
            label, what = f"{name}-d{width}-s{own.steps}", Variant(name, [], width, own.steps)
            arm = Arm(label=label, recipe=own, cost=cost_of(own), what=what, text=text, shares_rate=(name, width))
            found.setdefault(label, arm).what.rows.append(row)
    return list(found.values())


def _equal(row: str, recipe: Recipe, steps: int, reference: Cost) -> Recipe:
    """Changed to have as many steps, FLOPs or parameters as the reference."""
    if row == "iso_parameter":
        recipe = recipe.but({"model": {"hidden_dim": width_with(recipe, reference.parameters)}})
    elif row == "iso_flop":
        share = reference.flops / cost_of(recipe).flops
        steps = steps if abs(share - 1) < SAME_FLOPS else max(1, round(steps * share))
    return recipe.but({"trainer": {"num_train_steps": steps}})
