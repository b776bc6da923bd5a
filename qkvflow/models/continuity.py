"""Is a trained flow a solution of its ODE? Compares its evaluation on finer grids and with better methods.

A flow with weights that are smooth in t, trained on more than one grid, gives the same result with every solver. A
stack of layers in disguise does not: its weights are arbitrary between the training times.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.models.lm_model import LmExample

from qkvflow.axes import BATCH
from qkvflow.blocks import Inputs
from qkvflow.depth import DepthConfig, solver_by_name
from qkvflow.errors import UserError
from qkvflow.models.neuralode import NeuralOdeLMHeadModel
from qkvflow.named import is_named
from qkvflow.ranges import Steps, is_finite
from qkvflow.weights import PerLayer

MARGIN = 0.02  # nats per token
SHARE_OF_ORDER = 0.5
ROUNDING = 1e-5  # of states in fp32 after tens of steps, relative
SOLVERS = ("heun", "rk4")
_PROBABILITIES = 2**27  # 0.5 GB in fp32
_LIMITS = get_args(Steps)[1]


@dataclass(frozen=True)
class Reading:
    """The flow by one method on one grid, compared with the finest reading. What diverges is NaN or infinite.

    Attributes:
        loss: on the validation text, nats per token.
        state: ||y - y*|| / ||y*||, y = norm(x(1)) the state that the head reads (after the coda, if there is one), y*
            that of the finest reading; over the tokens that are compared.
        kl: KL(p* || p) of the next token, nats, mean over these tokens.
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
        trained: the reading as the flow was trained, or as it is evaluated outside training; for adaptive steps, that
            with `depth.steps` equal ones.
        readings: all, the finest last: that by the method of the highest order, and of those with the most steps.
        order: log2 of the ratio of the last two differences of y when the steps of the flow's own method are
            halved; NaN if one is not finite, None if it is unknown: for two grids, or differences that may be rounding
            (relative ones below ROUNDING).
        expected_order: that of the method.
    """

    trained: Reading
    readings: tuple[Reading, ...]
    order: float | None
    expected_order: int

    @property
    def worst(self) -> float:
        """The largest difference of a loss from that of `trained`, nats per token; NaN if one is."""
        return float(np.max([abs(r.loss - self.trained.loss) for r in self.readings]))

    @property
    def not_finite(self) -> str | None:
        """What is NaN or infinite, and where; None if all is finite."""
        for name, what in (("loss", "the loss"), ("state", "the distance of the states"), ("kl", "the KL")):
            # If the finest reading is NaN, the distances of all readings are: it is named first.
            for reading in reversed(self.readings):
                value = getattr(reading, name)
                if not is_finite(value):
                    return f"{what} is {value} for {reading.solver} with {reading.steps} steps"
        return None if self.order is None or is_finite(self.order) else f"the observed order is {self.order}"

    @property
    def is_continuous(self) -> bool:
        """The rule: all is finite, all losses are within 0.02 nats of the trained one's, and the observed order, if it
        is known, is at least half that of the method."""
        has_order = self.order is None or self.order >= SHARE_OF_ORDER * self.expected_order
        return self.not_finite is None and self.worst <= MARGIN and has_order

    @property
    def verdict(self) -> str:
        """The rule and its verdict, as a sentence."""
        if self.not_finite is not None:
            return f"not an ODE by the rule: {self.not_finite} (rule: finite)"
        found = f"losses differ by up to {self.worst:.3f} nats (rule: {MARGIN})"
        if self.order is None:
            found += ", the order is unknown: it takes three grids whose states differ by more than rounding"
        else:
            found += (
                f", the observed order is {self.order:.2f} of {self.expected_order}"
                f" (rule: {SHARE_OF_ORDER * self.expected_order:g})"
            )
        return f"{'an ODE' if self.is_continuous else 'not an ODE, a stack of layers'} by the rule: {found}"

    def as_json(self) -> dict[str, Any]:
        """For files: plain values; None for what is not finite, which JSON does not have."""
        return {
            "readings": [{k: _finite(v) for k, v in dataclasses.asdict(r).items()} for r in self.readings],
            "order": _finite(self.order),
            "expected_order": self.expected_order,
            "is_continuous": self.is_continuous,
            "verdict": self.verdict,
        }


def ways(model: NeuralOdeLMHeadModel, doublings: int = 2, solvers: Sequence[str] = SOLVERS) -> list[tuple[str, int]]:
    """Methods and steps to evaluate: L, 2L, ... by the flow's own method, the same by each of `solvers`.

    The finest, with the method of the highest order and of those the most steps, is moved to the end.

    Raises:
        UserError: ordinary layers, which have no weights between their times; plain residuals, which have no finer
            grid; more steps than a flow can have; or an unknown solver.
    """
    if isinstance(model.transformer.flow.weights, PerLayer):
        raise UserError(
            "continuity only applies to weights that are functions of time, and this model has ordinary layers, which"
            " have one depth."
        )
    depth = model.config.depth
    _check_grids(depth, 2**doublings)
    steps = [depth.reading_steps * 2**k for k in range(doublings + 1)]
    found = [(solver, n) for solver in dict.fromkeys([depth.solver, *solvers]) for n in steps]
    finest = max(reversed(found), key=lambda way: (_order(way[0]), way[1]))
    return [*(way for way in found if way != finest), finest]


def _check_grids(depth: DepthConfig, factor: int) -> None:
    """Refuses a depth that has no grid with `factor` times its steps."""
    steps = depth.reading_steps
    if depth.step_size == "residual":
        raise UserError(
            "continuity does not apply to step_size: residual. Plain residuals, x + B(x), have length 1 each, so they"
            " are not the steps of an ODE on [0, 1]: twice as many are another model, not a finer grid. Evaluate it"
            f" with `--steps {steps}`, or train a flow with `--model.depth.step_size uniform`."
        )
    if steps * factor not in _LIMITS:
        raise UserError(
            f"continuity evaluates this flow with up to {factor} times its {steps} steps, but {steps * factor} steps"
            f" are too many: the number must be {_LIMITS}. Evaluate single grids with `--steps` and `--solver`, or give"
            " fewer `doublings` in Python."
        )


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

    The finest comes first. Of the distributions {batch, position, vocab} there are two at a time.

    Args:
        example: the tokens on which states and distributions are compared; of a large batch its first sequences, with
            at most 2^27 probabilities, but at least one.
        loss: of a model on a text; by default that on `example`.
        step: called with the name of the next evaluation.

    Raises:
        UserError: what `ways` refuses, before anything is evaluated.
    """
    measured = loss or eqx.filter_jit(lambda m: hax.mean(m.compute_next_token_loss(example)).array)
    depth, few, best = model.config.depth, _first_sequences(model, example), None
    readings, own = list[Reading](), dict[int, jax.Array]()
    *others, finest = ways(model, doublings, solvers)
    for solver, steps in (finest, *others):
        step(f"{solver}, {steps} steps")
        read = model.with_depth(depth.on_grid(steps, solver=solver))
        state, log_p = _ends(read, few)
        best = best or (state, log_p)
        distances = _relative(state, best[0]), _kl(best[1], log_p)
        readings.append(Reading(solver, steps, read.config.plan.evaluations, float(measured(read)), *distances))
        if solver == depth.solver:
            own[steps] = state
    readings = (*readings[1:], readings[0])
    trained = next(r for r in readings if (r.solver, r.steps) == (depth.solver, depth.reading_steps))
    return Continuity(trained, readings, _observed_order([own[n] for n in sorted(own)]), _order(depth.solver))


def _first_sequences(model: NeuralOdeLMHeadModel, example: LmExample) -> LmExample:
    """As many as have _PROBABILITIES together."""
    if not example.tokens.has_axis(BATCH):
        return example
    batch = example.tokens.resolve_axis(BATCH).size
    few = max(1, _PROBABILITIES // (example.tokens.size // batch * model.Vocab.size))

    def cut(leaf):
        return leaf[BATCH, : min(few, batch)] if is_named(leaf) and leaf.has_axis(BATCH) else leaf

    return jax.tree.map(cut, example, is_leaf=is_named)


@eqx.filter_jit
def _ends(model: NeuralOdeLMHeadModel, example: LmExample) -> tuple[jax.Array, jax.Array]:
    """norm(x(1)), after the coda, and the log-probabilities of the next tokens; fp32."""
    end: NamedArray = model.solve(example.tokens, Inputs.of_example(example)).end
    logits = hax.dot(end, model.get_lm_head(), axis=model.Embed)
    log_p = jax.nn.log_softmax(logits.rearrange((..., model.Vocab)).array.astype(jnp.float32), axis=-1)
    return end.rearrange((..., model.Embed)).array.astype(jnp.float32), log_p


def _relative(state: jax.Array, best: jax.Array) -> float:
    return float(jnp.linalg.norm(state - best) / jnp.linalg.norm(best))


@jax.jit
def _mean_kl(log_best: jax.Array, log_p: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sum(jnp.exp(log_best) * (log_best - log_p), axis=-1))


def _kl(log_best: jax.Array, log_p: jax.Array) -> float:
    """Rounding can make it negative, which becomes 0; NaN stays NaN."""
    return float(np.maximum(_mean_kl(log_best, log_p), 0.0))


def _observed_order(states: Sequence[jax.Array]) -> float | None:
    """See `Continuity.order`; states on grids of L, 2L, ... steps."""
    moves = [_relative(b, a) for a, b in itertools.pairwise(states)][-2:]
    if not all(map(math.isfinite, moves)):
        return math.nan
    return math.log2(moves[0] / moves[1]) if len(moves) == 2 and min(moves) > ROUNDING else None


def _order(solver: str) -> int:
    return solver_by_name(solver).order(None)


def _finite(value: Any) -> Any:
    return value if is_finite(value) else None


def table(found: Continuity) -> str:
    """The evaluations as lines, and the verdict."""
    lines = [f"{'solver':<9}{'steps':>6}{'evaluations':>13}{'loss':>9}{'state':>10}{'KL':>10}"]
    lines += [
        f"{r.solver:<9}{r.steps:>6}{r.evaluations:>13}{r.loss:>9.3f}{r.state:>10.2e}{r.kl:>10.2e}"
        for r in found.readings
    ]
    return "\n".join([*lines, found.verdict])
