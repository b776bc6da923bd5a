"""The plan of the study: its YAML; flows with K functions of time, models with K of the trained model's layers."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.config import StudyConfig
from experiments.cost import cost_of
from experiments.jobs import Arm, Job, train
from experiments.recipes import value_at
from experiments.texts import Text
from qkvflow.data import copy_tokenizer
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.levanter_twin import enter, enter_config
from qkvflow.models.lifting import aligned, check_liftable, lift
from qkvflow.ranges import Count
from qkvflow.runs import load_run
from qkvflow.runs.config import RunTrainerConfig, TrainConfig
from qkvflow.runs.made import new_run
from qkvflow.weights import BasisConfig

KINDS = {
    "aligned": "W(t) with K functions of time, fitted to aligned layers",
    "not aligned": "W(t) with K functions of time, fitted to the original layers",
    "dropped": "K equally spaced layers; the others are dropped",
}


@dataclass
class LiftStudyConfig(StudyConfig):
    """In addition to `StudyConfig`:

    Attributes:
        train: keys of train_lm, for a model with ordinary layers (`weights: {type: per_layer}`, steps of length 1).
        heal: keys of finetune_lm, except its mode.
        basis: the functions of time.
        dims: values of K.
    """

    train: dict[str, Any] = field(default_factory=dict)
    heal: dict[str, Any] = field(default_factory=dict)
    basis: str = "cosine"
    dims: list[Count] = field(default_factory=list)

    @property
    def layers(self) -> int:
        """Layers of the trained model."""
        return self.train["model"]["depth"]["steps"]

    def check(self) -> None:
        super().check()
        if not isinstance(value_at(self.train, "model.depth.steps"), int):
            raise UserError("`train` must have `model.depth.steps`, the number of layers of the trained model")
        if not self.dims:
            raise UserError("`dims` is empty: give the numbers K of functions of time, for example [2, 4]")
        if max(self.dims, default=self.layers) >= self.layers:
            raise UserError(f"`dims` must be below the {self.layers} layers of the trained model, got {self.dims}")


@dataclass(frozen=True)
class Model:
    """kind: `trained`, or one of KINDS. k: number of functions of time, or of layers (of the trained model, all)."""

    kind: str
    k: int


def trained(config: LiftStudyConfig, text: Text, run_dir: Path) -> Arm:
    """The model that all others are made from.

    Raises:
        UserError: its configuration cannot be read, or no flow can be fitted to its layers.
    """
    recipe = config.recipe({}, text, run_dir, config.train)
    model = enter_config(recipe.config.model)
    check_liftable(model, BasisConfig(config.basis, max(config.dims)), align=True)
    return Arm(label="trained", recipe=recipe, cost=cost_of(recipe), what=Model("trained", config.layers), text=text)


def healed(config: LiftStudyConfig, base: Arm, seed: int, run_dir: Path) -> list[Job]:
    """Fine-tunes of all models made from one seed's model. `make_runs` creates their starting points."""
    jobs = []
    for k in config.dims:
        smaller = {"type": "basis", "basis": config.basis, "dim": k}
        models = {kind: {"weights": smaller} for kind in KINDS} | {"dropped": {"depth": {"steps": k}}}
        for kind, changes in models.items():
            mode = {"type": "full" if kind == "dropped" else "flow"}
            begins = {"run": str(_made(config, base, seed, run_dir, kind, k)), "mode": mode}
            arm = Arm(
                label=f"{kind.replace(' ', '_')}_{k}",
                recipe=config.recipe({}, base.text, run_dir, config.heal, begins),
                cost=cost_of(base.recipe.but({"model": changes})),
                what=Model(kind, k),
                text=base.text,
                asks={"base": Job.of(base, seed).recipe.digest(), "basis": config.basis},
            )
            jobs.append(Job.of(arm, seed))
    return jobs


def make_runs(config: LiftStudyConfig, base: Arm, seed: int, run_dir: Path) -> None:
    """Creates the runs from which one seed's fine-tunes start; existing runs stay unchanged. The model is trained where
    only its measurements are here, as on another machine."""
    wanted = {(kind, k): _made(config, base, seed, run_dir, kind, k) for kind in KINDS for k in config.dims}
    if all(target.exists() for target in wanted.values()):
        return
    begin = Job.of(base, seed).recipe
    if not begin.is_finished:
        train(begin)
    run = load_run(begin.run.path)
    model = enter(run.model)
    assert isinstance(model, NeuralOdeLMHeadModel)
    layers = {"aligned": aligned(model), "not aligned": model}
    for (kind, k), target in wanted.items():
        if not target.exists():
            made = dropped(model, k) if kind == "dropped" else lift(layers[kind], BasisConfig(config.basis, k))[0]
            trainer = RunTrainerConfig(num_train_steps=1, train_batch_size=run.config.trainer.train_batch_size)
            about = TrainConfig(made.config, run.config.data, trainer, vocab_size=model.Vocab.size)
            with new_run(target, about, made) as fresh:
                copy_tokenizer(run.directory.tokenizer, fresh.tokenizer)


def dropped(model: NeuralOdeLMHeadModel, k: int) -> NeuralOdeLMHeadModel:
    """The model with K of its layers."""
    depth = model.config.depth
    shallow = dataclasses.replace(model.config, depth=depth.on_grid(k))
    kept = model.transformer.flow.weights.copied(rows(depth.reading_steps, k), shallow.plan.times)
    return model.with_weights(kept, shallow)


def rows(layers: int, k: int) -> list[int]:
    """The remaining layers: the middle one of each of K equal parts."""
    return [int((i + 0.5) * layers / k) for i in range(k)]


def _made(config: LiftStudyConfig, base: Arm, seed: int, run_dir: Path, kind: str, k: int) -> Path:
    """Where a starting point lies: with another name for another basis or another trained model."""
    of = f"{config.basis}-{Job.of(base, seed).recipe.digest()}"
    return run_dir / f"made-{kind.replace(' ', '_')}-{k}-seed{seed}-{of}"
