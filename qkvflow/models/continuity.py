"""Is a trained flow a solution of its ODE? Compares its evaluation on finer grids and with better methods.

A flow with weights that are smooth in t, trained on more than one grid, gives the same result with every solver. A
stack of layers in disguise does not: its weights are arbitrary between the training times.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.models.lm_model import LmExample

from qkvflow.blocks import Inputs
from qkvflow.depth import solver_by_name
from qkvflow.errors import UserError
from qkvflow.models.neuralode import NeuralOdeLMHeadModel
from qkvflow.weights import PerLayer

MARGIN = 0.02  # nats per token
SHARE_OF_ORDER = 0.5
SOLVERS = ("heun", "rk4")


@dataclass(frozen=True)
class Reading:
    """The flow by one method on one grid, compared with the finest evaluation.

    Attributes:
        loss: on the validation text, nats per token.
        state: ||x(1) - x*(1)|| / ||x*(1)||, x* that of the finest reading, over all tokens of a batch.
        kl: KL(p* || p) of the next token, nats, mean over the tokens of the batch.
    """

    solver: str
    steps: int
    evaluations: int
    loss: float
    state: float
    kl: float


@dataclass(frozen=True)
class Continuity:
    """
    Attributes:
        trained: the reading as the flow was trained, or outside training is read.
        readings: all, `trained` first, the finest last.
        order: log2 of the ratio of the last two differences of x(1) when the steps of the flow's own method are
            halved; NaN for two grids.
        expected_order: that of the method.
    """

    trained: Reading
    readings: tuple[Reading, ...]
    order: float
    expected_order: int

    @property
    def worst(self) -> float:
        """The largest difference of a loss from that of `trained`, nats per token."""
        return max(abs(r.loss - self.trained.loss) for r in self.readings)

    @property
    def is_continuous(self) -> bool:
        """The rule: all losses within 0.02 nats of the trained one's, and at least half the order of the method."""
        has_order = math.isnan(self.order) or self.order >= SHARE_OF_ORDER * self.expected_order
        return self.worst <= MARGIN and has_order

    @property
    def verdict(self) -> str:
        """The rule and its verdict, as a sentence."""
        found = f"losses differ by up to {self.worst:.3f} nats (rule: {MARGIN})"
        if not math.isnan(self.order):
            found += (
                f", the observed order is {self.order:.2f} of {self.expected_order}"
                f" (rule: {SHARE_OF_ORDER * self.expected_order:g})"
            )
        return f"{'an ODE' if self.is_continuous else 'not an ODE, a stack of layers'} by the rule: {found}"

    def as_json(self) -> dict[str, Any]:
        """For files: plain values."""
        return {
            "readings": [dataclasses.asdict(r) for r in self.readings],
            "order": None if math.isnan(self.order) else self.order,
            "expected_order": self.expected_order,
            "is_continuous": self.is_continuous,
            "verdict": self.verdict,
        }


def ways(model: NeuralOdeLMHeadModel, doublings: int = 2, solvers: Sequence[str] = SOLVERS) -> list[tuple[str, int]]:
    """Methods and steps to evaluate: L, 2L, ... by its own method, the same by each of `solvers`, the finest last.

    Raises:
        UserError: ordinary layers, which have no weights between their times.
    """
    if isinstance(model.transformer.flow.weights, PerLayer):
        raise UserError(
            "continuity only applies to weights that are functions of time, and this model has ordinary layers, which"
            " have one depth."
        )
    depth = model.config.depth
    steps = [depth.reading_steps * 2**k for k in range(doublings + 1)]
    others = [solver for solver in solvers if solver != depth.solver]
    return [(depth.solver, n) for n in steps] + [(solver, n) for solver in others for n in steps]


def continuity(
    model: NeuralOdeLMHeadModel,
    example: LmExample,
    loss: Callable[[NeuralOdeLMHeadModel], float] | None = None,
    *,
    doublings: int = 2,
    solvers: Sequence[str] = SOLVERS,
    step: Callable[[str], Any] = lambda name: None,
) -> Continuity:
    """Evaluates a flow with several methods on several grids.

    Args:
        example: the tokens on which states and distributions are compared.
        loss: of a model on a text; by default that on `example`.
        step: called with the name of the next evaluation.

    Raises:
        UserError: ordinary layers.
    """
    measured = loss or (
        lambda m: float(eqx.filter_jit(lambda m: hax.mean(m.compute_next_token_loss(example)).array)(m))
    )
    depth, found = model.config.depth, []
    for solver, steps in ways(model, doublings, solvers):
        step(f"{solver}, {steps} steps")
        read = model.with_depth(depth.on_grid(steps, solver=solver))
        state, log_p = _ends(read, example)
        found.append((solver, steps, read.config.plan.evaluations, measured(read), state, log_p))
    _, _, _, _, finest, log_best = found[-1]
    readings = tuple(
        Reading(solver, steps, evaluations, value, _relative(state, finest), _kl(log_best, log_p))
        for solver, steps, evaluations, value, state, log_p in found
    )
    own = [state for solver, _, _, _, state, _ in found if solver == depth.solver]
    moves = [float(jnp.linalg.norm(b - a)) for a, b in itertools.pairwise(own)]
    order = math.log2(moves[-2] / moves[-1]) if len(moves) > 1 and min(moves) > 0 else math.nan
    return Continuity(readings[0], readings, order, solver_by_name(depth.solver).order(None))


@eqx.filter_jit
def _loss(model: NeuralOdeLMHeadModel, example: LmExample) -> jax.Array:
    return jnp.asarray(model.compute_next_token_loss(example))


@eqx.filter_jit
def _ends(model: NeuralOdeLMHeadModel, example: LmExample) -> tuple[jax.Array, jax.Array]:
    """x(1) of the flow, after coda and norm, and the log-probabilities of the next tokens; fp32."""
    end: NamedArray = model.solve(example.tokens, Inputs.of_example(example)).end
    logits = hax.dot(end, model.get_lm_head(), axis=model.Embed)
    log_p = jax.nn.log_softmax(logits.rearrange((..., model.Vocab)).array.astype(jnp.float32), axis=-1)
    return end.rearrange((..., model.Embed)).array.astype(jnp.float32), log_p


def _relative(state: jax.Array, best: jax.Array) -> float:
    return float(jnp.linalg.norm(state - best) / jnp.linalg.norm(best))


def _kl(log_best: jax.Array, log_p: jax.Array) -> float:
    return max(0.0, float(np.mean(jnp.sum(jnp.exp(log_best) * (log_best - log_p), axis=-1))))


def table(found: Continuity) -> str:
    """The evaluations as lines, and the verdict."""
    lines = [f"{'solver':<9}{'steps':>6}{'evaluations':>13}{'loss':>9}{'state':>10}{'KL':>10}"]
    lines += [
        f"{r.solver:<9}{r.steps:>6}{r.evaluations:>13}{r.loss:>9.3f}{r.state:>10.2e}{r.kl:>10.2e}"
        for r in found.readings
    ]
    return "\n".join([*lines, found.verdict])
