"""What is trained: the YAML of the study; a flow, and ordinary layers in its place."""

from dataclasses import dataclass, field
from pathlib import Path

from experiments.cost import cost_of
from experiments.jobs import Arm
from experiments.protocol import SeedsConfig
from experiments.recipes import Recipe, merged, ordinary
from experiments.texts import Builtin, Text, TextConfig
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeConfig
from qkvflow.weights import PerLayerConfig

SYSTEMS = {"flow": "a flow", "layers": "as many ordinary layers (sequential) instead"}


@dataclass
class DynamicsConfig(SeedsConfig):
    """Besides what `SeedsConfig` says:

    Attributes:
        text: `{type: wikitext2, folder: DIR}`, `{type: files, name, train, select, report}` or `{type: builtin}`.
        base: configuration of train_lm of a flow by Euler on a fixed grid; its data is replaced by `text`.
        checkpoints: at how many points of a training spectra are read, the last at its end.
        texts, length: sequences of the part `report` whose tokens are scored, and how many tokens they have.
    """

    text: TextConfig = field(default_factory=Builtin)
    base: str | None = None
    checkpoints: int = 3
    texts: int = 8
    length: int = 24
    evaluations: int = 3

    def check(self) -> None:
        super().check()
        if self.base is None:
            raise UserError(
                "`base` is missing: a configuration of train_lm with a flow, such as configs/quickstart.yaml"
            )
        self.check_least(checkpoints=1, texts=2, length=5)


@dataclass(frozen=True)
class System:
    """system: of SYSTEMS."""

    system: str


def arms(config: DynamicsConfig, text: Text, run_dir: Path) -> list[Arm]:
    """The systems, in their order.

    Raises:
        UserError: if the base has no flow by Euler on a fixed grid, or less steps than checkpoints.
    """
    flow = config.recipe(config.base, text, run_dir)
    model = flow.config.model
    if not isinstance(model, NeuralOdeConfig) or isinstance(model.weights, PerLayerConfig):
        raise UserError(f"{config.base} must be a `type: neuralode` with weights that are functions of time")
    if model.depth.is_general or model.training_plans or model.depth.solver != "euler" or model.depth.steps < 2:
        raise UserError(f"{config.base} must be a flow by Euler on a fixed grid of at least two steps")
    if flow.steps < config.checkpoints:
        raise UserError(f"`checkpoints` is {config.checkpoints}, of {flow.steps} steps in all")
    raw = merged(flow.raw["model"], {"depth": {"steps": model.depth.steps}})
    models = {"flow": raw, "layers": ordinary(raw, model.depth.steps)}
    keep = {"trainer": {"checkpointer": {"keep": [{"every": flow.steps // config.checkpoints}]}}}
    recipes = {name: Recipe({**flow.raw, "model": models[name]}).but(keep) for name in SYSTEMS}
    asks = {key: getattr(config, key) for key in ("checkpoints", "texts", "length")}
    return [
        Arm(label=name, recipe=recipe, cost=cost_of(recipe), what=System(name), text=text, asks=asks)
        for name, recipe in recipes.items()
    ]
