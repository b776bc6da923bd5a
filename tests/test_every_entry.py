"""Every public entry over weights x block x depth x control: each works and hears control, or refuses with a reason.

A few are fast; the slow ones hold every pair of weights, blocks and depths.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import levanter.tracker
import numpy as np
import pytest
from haliax import Axis
from levanter.optim import AdamConfig
from levanter.tracker import NoopTracker
from levanter.trainer import TrainerConfig
from support.models import VOCAB, WEIGHTS, build, heavy, llama, random_tokens, small_config

import qkvflow
from qkvflow.analysis.reading import read
from qkvflow.analysis.spectral import ov_eigenvalues
from qkvflow.analysis.trajectory import motion
from qkvflow.blocks import Gpt2BlockConfig, Inputs, SsmBlockConfig
from qkvflow.data.control.sequences import ControlledExample
from qkvflow.depth import DepthConfig, StepGrowth, StepRange
from qkvflow.errors import UserError
from qkvflow.evaluation.depths import displacement
from qkvflow.models import ControlConfig
from qkvflow.runs import TrainConfig
from qkvflow.runs.modes import FlowMode, FullMode, LoraMode
from qkvflow.training.description import describe
from qkvflow.training.step import make_trainer

BLOCKS = {
    "gpt2, parallel": Gpt2BlockConfig(num_heads=2, mlp_scale=2),
    "gpt2, sequential": Gpt2BlockConfig(num_heads=2, mlp_scale=2, form="sequential"),
    "gpt2, split": Gpt2BlockConfig(num_heads=2, mlp_scale=2, form="split"),
    "llama": llama(),
    "llama, sequential": llama("sequential"),
    "ssm": SsmBlockConfig(num_heads=2, state_size=4),
}
DEPTHS = {
    "euler": DepthConfig(steps=2),
    "heun": DepthConfig(solver="heun", steps=2),
    "reversible": DepthConfig(steps=2, adjoint="reversible"),
    "jitter": DepthConfig(steps=2, time_sampling="jitter"),
    "range": DepthConfig(steps=StepRange(2, 3)),
    "growth": DepthConfig(steps=StepGrowth({0.0: 1, 0.5: 2})),
    "adaptive": DepthConfig(solver="heun", steps=2, rtol=1e-1),
    "backsolve": DepthConfig(solver="heun", steps=2, adjoint="backsolve"),
}
ONE_GRID = ("euler", "heun", "reversible")  # all that ordinary layers can be read on
CONTROL = ControlConfig(dim=3, alpha=0.5)
TOKENS = random_tokens(batch=2, length=6)
TRAINER = TrainerConfig(id="every-entry", require_accelerator=False)
SIGNAL = hax.random.normal(jax.random.PRNGKey(1), (TOKENS.resolve_axis("batch"), Axis("control", 3)))


@dataclass(frozen=True)
class Case:
    weights: str
    block: str
    depth: str

    def __str__(self) -> str:
        return "-".join((self.weights, self.block, self.depth)).replace(", ", "_")

    def config(self, control: ControlConfig | None):
        return small_config(self.weights, block=BLOCKS[self.block], depth=DEPTHS[self.depth], control=control)

    @property
    def is_refused(self) -> bool:
        return (self.weights == "per_layer" and self.depth not in ONE_GRID) or (
            BLOCKS[self.block].depends_on_step and self.depth == "jitter"
        )


def _parts(found) -> list[np.ndarray]:
    found = found if isinstance(found, tuple) else (found,)
    return [np.asarray(part.array if isinstance(part, hax.NamedArray) else part) for part in found]


def example_of(control) -> ControlledExample:
    weight = hax.ones(TOKENS.axes).at["position", -1].set(0.0)
    if control is not None:
        control = control.broadcast_axis(TOKENS.resolve_axis("position")).rearrange(("batch", "position", "control"))
    return ControlledExample(TOKENS, weight, Inputs.of().mask, control)


def train_config(model) -> TrainConfig:
    return TrainConfig(model=model.config)


def loss_of_step(model, control, gradient: bool = True):
    """What the training step minimises, and its gradient, by the function that the step is made of."""
    with levanter.tracker.current_tracker(NoopTracker()):
        trainer = make_trainer(train_config(model), TRAINER, AdamConfig().build(4))
    loss = lambda model, example: trainer.loss_fn(model, example, key=jax.random.PRNGKey(2))[0]  # noqa: E731
    with TRAINER.use_device_mesh():
        if not gradient:
            return eqx.filter_jit(loss)(model, example_of(control))
        value, slope = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, example_of(control))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slope))
    return value


def train(model, control):
    return loss_of_step(model, control)


def evaluate(model, control):
    return model.compute_next_token_loss(example_of(control)), displacement(model, example_of(control))


def generate(model, control):
    """The tokens alone could be equal, so a few are written, by a model that repeats itself less."""
    return qkvflow.generate(model, TOKENS, 6, temperature=1.0, control=control).array


def discretise(model, control):
    steps = None if not model.config.depth.is_adaptive else 2
    return model.discretise(steps)(TOKENS, control=control).array


def analyse(model, control):
    if control is not None:
        control = control["batch", 0]
    depth = 2 if model.config.depth.is_adaptive else None
    row = TOKENS["batch", 0]
    assert np.isfinite(ov_eigenvalues(model)).all()
    read_form = read(model, depth, control=control)
    return motion(read_form, row).speed


def finetune(mode) -> Callable:
    def tune(model, control):
        steps = 3 if model.config.weights != WEIGHTS["per_layer"] else None
        adapted = mode.adapt(model, mode.model_config(model.config, steps), key=jax.random.PRNGKey(3))
        return loss_of_step(adapted, control, gradient=False)

    return tune


ENTRIES = {
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "discretise": discretise,
    "analyse": analyse,
    "finetune flow": finetune(FlowMode()),
    "finetune full": finetune(FullMode()),
    "finetune lora": finetune(LoraMode(r=2)),
}
# What an entry cannot do with a choice, and why it says so.
REFUSED = {
    ("generate", "adaptive"): "adaptive",
    ("finetune flow", "per_layer"): "ordinary layers",
}


def _pairs() -> list[Case]:
    """Every pair of weights, blocks and depths that can go together at least once."""
    every = [Case(*names) for names in itertools.product(WEIGHTS, BLOCKS, DEPTHS)]
    pairs_of = {
        case: set(itertools.combinations(enumerate((case.weights, case.block, case.depth)), 2))
        for case in every
        if not case.is_refused
    }
    missing, chosen = set().union(*pairs_of.values()), []
    while missing:
        best = max(pairs_of, key=lambda case: len(pairs_of[case] & missing))
        chosen.append(best)
        missing -= pairs_of[best]
    return chosen


# Training with adaptive steps and the displacement once left control out.
ADAPTIVE, GROWING = Case("generated", "gpt2, parallel", "adaptive"), Case("basis", "llama, sequential", "growth")
FAST = {(ADAPTIVE, "train"), (ADAPTIVE, "evaluate"), *((GROWING, entry) for entry in ENTRIES)}
CASES = [ADAPTIVE, GROWING, *(case for case in _pairs() if case not in (ADAPTIVE, GROWING))]


@pytest.mark.parametrize(
    ("case", "entry"),
    [
        pytest.param(case, entry, marks=[] if (case, entry) in FAST else [pytest.mark.slow], id=f"{case}-{entry}")
        for case, entry in itertools.product(CASES, ENTRIES)
    ],
)
def test_an_entry_works_and_hears_control(case, entry):
    reason = next(
        (why for (name, choice), why in REFUSED.items() if name == entry and choice in vars(case).values()), ""
    )
    model = build(case.config(CONTROL))
    if reason:
        with pytest.raises(UserError, match=reason):
            ENTRIES[entry](model, SIGNAL)
        return
    without, with_control = (_parts(ENTRIES[entry](model, control)) for control in (0.0 * SIGNAL, SIGNAL))
    for a, b in zip(without, with_control, strict=True):
        assert np.isfinite(a).all()
        assert np.isfinite(b).all()
        assert np.abs(a - b).max() > 1e-5, f"{entry} does not hear control"


@pytest.mark.parametrize("entry", ["train", "evaluate", "generate", "discretise", "analyse"])
def test_a_model_without_control_refuses_it(entry):
    model = build(GROWING.config(None))
    with pytest.raises(UserError, match="control"):
        ENTRIES[entry](model, SIGNAL)


@pytest.mark.parametrize("case", [ADAPTIVE, GROWING, *map(heavy, CASES[2:])], ids=str)
def test_describe_tells_what_control_costs(case):
    plain, controlled = (describe(TrainConfig(model=case.config(c)), VOCAB.size)["parameters"] for c in (None, CONTROL))
    assert sum(controlled.values()) > sum(plain.values())


@pytest.mark.parametrize("depth", [depth for depth in DEPTHS if depth not in ONE_GRID])
@pytest.mark.parametrize("control", [None, CONTROL], ids=["plain", "control"])
def test_ordinary_layers_have_no_depth_but_their_own(depth, control):
    with pytest.raises(UserError, match="per_layer only has weights at the times of one fixed grid"):
        Case("per_layer", "llama", depth).config(control)
