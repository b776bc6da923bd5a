"""What is trained: the arms of all groups as configurations of train_lm, each model once."""

import dataclasses
import hashlib
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.ablations.config import AblationsConfig, Group
from experiments.cost import Cost, cost_of
from experiments.systems import evaluated, merged, on_text
from experiments.texts import Text
from qkvflow.config import decode, read_yaml
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeConfig
from qkvflow.runs.config import TrainConfig
from qkvflow.weights import PerLayerConfig

Place = tuple[str, int]


@dataclass(frozen=True)
class Variant:
    """A model that is trained.

    label: name of its first arm and a hash of all that it depends on, so that a changed arm is another run.
    arms: (group, arm), all that it stands for. places: (solver, steps), where it is read besides.
    evaluations: of blocks in a training step, the mean if their number is drawn at random.
    raw: configuration of train_lm without a name, seed and chosen learning rate.
    """

    label: str
    arms: tuple[tuple[str, str], ...]
    places: tuple[Place, ...]
    cost: Cost
    evaluations: float
    raw: dict[str, Any]

    @property
    def size(self) -> str:
        return self.label

    @property
    def flops(self) -> float:
        return self.cost.flops * self.raw["trainer"]["num_train_steps"]


def variants(config: AblationsConfig, text: Text, run_dir: Path) -> list[Variant]:
    """The models of the chosen groups. Their names do not depend on which groups are chosen.

    Errors: `UserError` if a configuration cannot be read, or a model cannot be read where it shall be.
    """
    found: dict[str, Variant] = {}
    for group_name, group in config.groups.items():
        for arm in group.arms:
            raw = _raw(config, group, arm, text, run_dir)
            digest = _digest(raw, text)
            known = found.get(digest)
            if known is None:
                try:
                    cost = cost_of(raw)
                    known = Variant(f"{arm}-{digest}", (), (), cost, _evaluations(raw, cost), raw)
                except UserError as error:
                    raise UserError(f"groups.{group_name}.arms.{arm}: {error}") from None
            if group_name in config.chosen:
                _check_places(raw, group.places, f"groups.{group_name}.read: {arm}")
                places = tuple(dict.fromkeys((*known.places, *group.places)))
                known = dataclasses.replace(known, arms=(*known.arms, (group_name, arm)), places=places)
            found[digest] = known
    return [variant for variant in found.values() if variant.arms]


def settings(changes: dict[str, Any], prefix: str = "") -> str:
    """What an arm changes, in one line: `model.depth.steps=12`."""
    flat = []
    for key, value in changes.items():
        nested = isinstance(value, dict) and value
        flat.append(settings(value, f"{prefix}{key}.") if nested else f"{prefix}{key}={value}")
    return ", ".join(flat)


def _raw(config: AblationsConfig, group: Group, arm: str, text: Text, run_dir: Path) -> dict[str, Any]:
    changes = dict(group.arms[arm])
    base = changes.pop("base", None) or group.base or config.base
    raw = read_yaml(Path(base))
    for over in (config.overrides, group.overrides, changes):
        raw = merged(raw, over)
    return evaluated(on_text(raw, text, run_dir, config.select_batches), config.evaluations)


def _digest(raw: dict[str, Any], text: Text) -> str:
    """Of everything that settles a training but its seed and learning rate; of the text, not of where it lies."""
    matter = {key: value for key, value in raw.items() if key not in ("data", "run_dir")}
    matter |= {"tokenizer": raw["data"]["tokenizer"], "train": text.hash("train"), "select": text.hash("select")}
    return hashlib.sha256(json.dumps(matter, sort_keys=True).encode()).hexdigest()[:8]


def _evaluations(raw: dict[str, Any], cost: Cost) -> float:
    model = decode(TrainConfig, raw).model
    if isinstance(model, NeuralOdeConfig) and model.training_plans:
        flow = statistics.fmean(plan.evaluations for plan in model.training_plans)
        return flow + model.prelude_layers + model.coda_layers
    return cost.evaluations


def _check_places(raw: dict[str, Any], places: list[Place], where: str) -> None:
    """Errors: `UserError` if the model cannot be read at one of `places`."""
    model = decode(TrainConfig, raw).model
    if not places:
        return
    if not isinstance(model, NeuralOdeConfig) or isinstance(model.weights, PerLayerConfig):
        raise UserError(f"{where} is no flow but a model of one depth, and cannot be read at another: leave out `read`")
    for solver, steps in places:
        try:
            model.depth.on_grid(steps, solver=solver)
        except UserError as error:
            raise UserError(f"{where} cannot be read by {solver} in {steps} steps: {error}") from None
