"""The plan of the study: its YAML, and its arms at the width of the search and at their own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from experiments.alike import check_alike
from experiments.config import OtherDepthsConfig, check_among, check_reference
from experiments.continuity.stack import stacked
from experiments.cost import cost_of
from experiments.jobs import Arm, Place, Places, Rates
from experiments.recipes import Recipe
from experiments.search import SearchConfig
from experiments.texts import Text
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeConfig
from qkvflow.ranges import Count, Range


@dataclass
class ContinuityConfig(OtherDepthsConfig, SearchConfig):
    """In addition to `OtherDepthsConfig` and `SearchConfig`; a learning rate is selected for each arm, at a smaller
    width:

    Attributes:
        base: configuration of train_lm that arms start from; its data is replaced by `text`.
        arms: name -> changes merged into the configuration last; the key `base` selects another file to start from.
            `stack: {0.0: 3, 0.25: 6, 0.6: 12}`: per-layer models that grow by copies of their layers (fine-tuning,
            `mode: {type: stack}`), in the manner of `depth.steps: {grow: ...}`.
        reference: the arm with whose loss and FLOPs the others are compared.
        only: names of arms; others are left out. Finished results stay in `readings`.
        panels: title -> arms that are drawn together.
        layers: L, the steps at which all arms are evaluated.
        depths: other numbers of steps, each with the arm's own solver; null: all from 2 to 4 L.
    """

    base: str | None = None
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    reference: str = "per_layer"
    only: list[str] | None = None
    panels: dict[str, list[str]] = field(default_factory=dict)
    search_width: Count | None = 64
    beyond_grid: Annotated[int, Range(at_least=0)] = 4
    layers: Count = 12
    depths: list[Count] | None = None

    @property
    def chosen(self) -> list[str]:
        return list(self.arms) if self.only is None else self.only

    @property
    def steps_read(self) -> list[int]:
        """The numbers of steps at which flows are evaluated."""
        steps = range(2, 4 * self.layers + 1) if self.depths is None else self.depths
        return sorted({*steps, self.layers})

    def places(self, solver: str) -> list[Place]:
        """Where a flow is evaluated: with its own solver at all depths, and with RK4."""
        return [*((solver, n) for n in self.steps_read), *([] if solver == "rk4" else [("rk4", self.layers)])]

    def whole(self, name: str, text: Text, run_dir: Path, width: int | None = None) -> Recipe:
        """The configuration of an arm, for a stack as if it had all its layers from the beginning.

        Raises:
            UserError: it cannot be read, is no model of ours, or does not have `layers` steps.
        """
        changes = {key: value for key, value in self.arms[name].items() if key != "stack"}
        recipe = self.recipe(self.base, text, run_dir, changes)
        recipe = recipe.but({"model": {"hidden_dim": width}} if width else {})
        model = recipe.config.model
        if not isinstance(model, NeuralOdeConfig):
            raise UserError(
                f"arms.{name} has `model.type: {recipe.raw['model'].get('type')}`, a model without steps. Layers"
                " are `type: neuralode` with `weights: {type: per_layer}` and `depth: {step_size: residual}`"
            )
        steps = model.depth.reading_steps
        if steps != self.layers:
            raise UserError(f"arms.{name} is read with {steps} steps, but `layers` is {self.layers}: make them equal")
        return recipe

    def check(self) -> None:
        super().check()
        for key, names in {
            "only": self.chosen,
            **{f"panels.{title}": own for title, own in self.panels.items()},
        }.items():
            check_among(key, names, self.arms)
        check_reference("`reference`", self.reference, self.chosen, "the arms")


@dataclass(frozen=True)
class Named:
    """arm: its name. width: `hidden_dim`. solver: of its steps."""

    arm: str
    width: int
    solver: str


def arms(config: ContinuityConfig, text: Text, run_dir: Path, rates: Rates | None = None) -> list[Arm]:
    """The arms at their own width, with learning rates derived from those of the search, or their own without a
    search; without `rates`, the arms of the search.

    Raises:
        UserError: a configuration cannot be read, or does not have `layers` steps; a flow cannot be evaluated at one of
            the places; or arms do not read the same tokens, or have other numbers of training steps.
    """
    size = config.search_width if rates is None else None
    given, found = {name: config.whole(name, text, run_dir, size) for name in config.chosen}, []
    check_alike(given, config.reference)
    _check_lengths(given, config.reference)
    for name, recipe in given.items():
        depth, width = recipe.config.model.depth, recipe.config.model.Embed.size
        if rates and name in rates:
            recipe = recipe.but({"optimizer": {"learning_rate": config.transferred(rates[name], width)}})
        flow = Places(config.places(depth.solver), config.read_batches) if recipe.is_flow else None
        if flow:
            try:
                flow.check(depth)
            except UserError as error:
                raise UserError(f"arms.{name}: {error}") from None
        what, label = Named(name, width, depth.solver), f"{name}-d{width}"
        arm = Arm(label=label, recipe=recipe, cost=cost_of(recipe), what=what, text=text, flow=flow, shares_rate=name)
        found.append(stacked(arm, config.arms[name]["stack"]) if "stack" in config.arms[name] else arm)
    return found


def _check_lengths(given: Mapping[str, Recipe], reference: str) -> None:
    """Raises: UserError: arms have other numbers of training steps, but the page has one for all."""
    steps = given[reference].steps
    for name, recipe in given.items():
        if recipe.steps != steps:
            raise UserError(
                f"arms.{name} has {recipe.steps} for `trainer.num_train_steps`, and {reference} has {steps}: losses,"
                " FLOPs and depths are compared after trainings of one length. Set it for all, in `overrides`"
            )
