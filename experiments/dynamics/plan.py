"""The plan of the study: its YAML; a flow, and ordinary layers in its place."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from experiments.config import StudyConfig
from experiments.jobs import Arm, System
from experiments.recipes import Recipe, ordinary
from experiments.texts import Text
from qkvflow.errors import UserError
from qkvflow.ranges import Count, Range

SYSTEMS = {"flow": "a flow", "layers": "as many ordinary layers (sequential) instead"}


@dataclass
class DynamicsConfig(StudyConfig):
    """In addition to `StudyConfig`:

    Attributes:
        base: configuration of train_lm, an Euler flow on a fixed grid; its data is replaced by `text`.
        checkpoints: number of points in training at which spectra are computed, the last at its end.
        texts, length: number of sequences of the part `report` whose tokens are scored, and their tokens.
    """

    base: str | None = None
    checkpoints: Count = 3
    texts: Annotated[int, Range(at_least=2)] = 8
    length: Annotated[int, Range(at_least=5)] = 24
    evaluations: Count = 3


def arms(config: DynamicsConfig, text: Text, run_dir: Path) -> list[Arm]:
    """The systems, in order.

    Raises:
        UserError: the base is not an Euler flow of steps 1/L on a fixed grid, or has fewer steps than checkpoints; the
            text has too few sequences.
    """
    flow = config.recipe(config.base, text, run_dir)
    raw, depth = flow.euler_flow(), flow.config.model.depth
    steps = depth.steps
    if depth.step_size != "uniform":
        raise UserError(
            f"{config.base} has `depth.step_size: {depth.step_size}`, but one of the scores is that of the official"
            " code, for steps of length 1/L: set it to uniform"
        )
    if steps < 2:
        raise UserError(f"{config.base} must be a flow of at least two steps")
    if flow.steps < config.checkpoints:
        raise UserError(f"`checkpoints` is {config.checkpoints}, of {flow.steps} steps in all")
    sequences, length = flow.batch, flow.config.Pos.size
    if config.texts > sequences or config.length > length:
        raise UserError(
            f"`texts` is {config.texts} and `length` {config.length}, but tokens are scored in one batch of {sequences}"
            f" sequences of {length} tokens: lower them, or raise `trainer.train_batch_size` or `model.max_seq_len`"
        )
    there = len(flow.tokenizer().encode(text.read("report"))) // length
    if config.texts > there:
        raise UserError(
            f"`texts` is {config.texts}, but the part `report` of {text.name} has {there} sequences of {length} tokens:"
            " lower it, or give more text"
        )
    models = {"flow": raw, "layers": ordinary(raw, steps)}
    keep = {"trainer": {"checkpointer": {"keep": [{"every": flow.steps // config.checkpoints}]}}}
    recipes = {name: Recipe({**flow.raw, "model": models[name]}).but(keep) for name in SYSTEMS}
    asks = {key: getattr(config, key) for key in ("checkpoints", "texts", "length")}
    return System.arms(recipes, text, asks)
