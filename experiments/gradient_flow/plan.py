"""What is trained: hybrid, baseline and the hybrid without its middle, as runs of train_lm, otherwise alike."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.gradient_flow.config import GradientFlowConfig
from experiments.systems import evaluated, merged, system
from experiments.texts import Text
from qkvflow.config import decode
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeConfig
from qkvflow.runs.config import TrainConfig
from qkvflow.weights import PerLayerConfig


@dataclass(frozen=True)
class Job:
    """One training. config: what train_lm is given."""

    system: str
    seed: int
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return self.config["trainer"]["id"]

    @property
    def evaluations(self) -> int:
        """Of blocks, or layers, per token and step of training."""
        model = self.config["model"]
        return model["prelude_layers"] + model["depth"]["steps"] + model["coda_layers"]


def planned_jobs(config: GradientFlowConfig, text: Text, run_dir: Path) -> list[Job]:
    """All trainings, a whole seed before the next.

    Errors: `UserError` if the hybrid has no flow on a fixed grid, no ordinary layers around it, or no control.
    """
    raw = _hybrid(config, text, run_dir)
    models = {
        "hybrid": raw["model"],
        "baseline": _ordinary(raw["model"], config.replaced_layers),
        # The coda's layers stand where the flow was: a flow has one step at least.
        "shallow": _ordinary(raw["model"], raw["model"]["coda_layers"]) | {"coda_layers": 0},
    }
    return [_job(raw | {"model": models[name]}, name, seed) for seed in config.seeds for name in config.systems]


def _hybrid(config: GradientFlowConfig, text: Text, run_dir: Path) -> dict[str, Any]:
    raw = system(config.hybrid, config.overrides, text, run_dir, config.select_batches)
    plain = decode(TrainConfig, raw)
    trainer, model = plain.trainer, plain.model
    if not isinstance(model, NeuralOdeConfig) or isinstance(model.weights, PerLayerConfig) or model.control is None:
        raise UserError(f"{config.hybrid} must be a `type: neuralode` with a flow and `control`, as the hybrid is")
    if not model.prelude_layers or not model.coda_layers:
        raise UserError(
            f"{config.hybrid} has {model.prelude_layers} layers before its flow and {model.coda_layers} after it; at"
            " least one of each is needed: `prelude_layers`, `coda_layers`"
        )
    if model.depth.is_general or model.training_plans or model.depth.solver != "euler":
        raise UserError(
            f"{config.hybrid} must be trained with Euler on a fixed grid: what is read at other solvers and steps is"
            " compared with that"
        )
    if config.final_steps > trainer.num_train_steps:
        raise UserError(f"`final_steps` is {config.final_steps}, of {trainer.num_train_steps} steps in all")
    ours = {
        "model": {"depth": {"steps": model.depth.steps}},
        "trainer": {
            # Norms of the gradients as they come, before the optimizer clips them, in every step.
            "watch": {"watch_targets": ["grads"], "interval": 1, "split_scan_layers": False},
        },
        "max_skipped_steps": trainer.num_train_steps,  # steps that are not finite are counted
    }
    return evaluated(merged(raw, ours), config.evaluations)


def _ordinary(model: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same model with ordinary layers in place of its flow.

    A flow of per-layer weights in Euler steps of length 1 is a stack of ordinary layers; so embeddings, prelude and
    coda have the same names, and with the same seed the same initial weights, in all systems.
    """
    form = {"block": {"form": "sequential"}}
    replaced = {
        "weights": {"type": "per_layer"},
        "depth": {"solver": "euler", "steps": layers, "step_size": "residual"},
    }
    return merged(model, form) | replaced | {"control": None}


def _job(raw: dict[str, Any], name: str, seed: int) -> Job:
    raw = copy.deepcopy(raw)
    raw["trainer"] |= {"id": f"{name}-seed{seed}", "seed": seed}
    return Job(name, seed, raw)
