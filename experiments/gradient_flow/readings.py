"""Other evaluations of a trained model: its middle with other solvers, smaller steps, or left out; and with control.

A model's middle is evaluated with smaller steps, or another solver, and the logits l (centred over the vocabulary,
since a constant changes no prediction) are compared with the logits l_0 of the trained model:

    divergence = ||l - l_0|| / ||l_0||          share = divergence / divergence of the model with its middle left out

A small divergence alone proves nothing: a middle without effect is invariant too. The share relates the change to the
whole effect of the middle. A model passes if it is below SHARE in every evaluation with smaller Euler steps.

Negative control: the baseline's ordinary layers x + B_k(x), k = 0..n-1, treated as a flow dx/dt = B_floor(t)(x) on
[0, n] with steps of 1/m: each layer is applied m times, as x + B_k(x)/m. Training did not make this invariant. Their
steps are longer than the flow's; layers of the same steps (`untied`) have weights W(t), constant between the times of
the trained grid, and are evaluated just like the flow, also with fewer steps.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from levanter.models.lm_model import LmExample
from scipy.special import logsumexp

from qkvflow.axes import CONTROL
from qkvflow.evaluation.depths import displacement
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.weights import PerLayer

SHARE = 0.1
_FLOW = lambda model: model.transformer.flow  # noqa: E731


@dataclass(frozen=True)
class Changed:
    """A model evaluated in another way.

    Attributes:
        displacement: of the flow. solver, steps, evaluations: if a solver with so many steps is used.
        factor: if the middle has steps of 1 / factor of the trained length; share: see above.
    """

    loss: float
    divergence: float
    displacement: float | None = None
    solver: str = ""
    steps: int = 0
    evaluations: int = 0
    factor: int | None = None
    share: float = 1.0


@dataclass(frozen=True)
class Refined:
    """displacement: as trained. left_out: without the middle. refined: with smaller steps; coarse: with fewer."""

    displacement: float
    left_out: Changed
    refined: list[Changed]
    coarse: list[Changed] = field(default_factory=list)

    @property
    def passes(self) -> bool:
        """Whether the share is below SHARE in all refined evaluations. A middle without effect does not pass."""
        return self.left_out.divergence > 0.0 and all(r.share < SHARE for r in self.refined)


@dataclass(frozen=True)
class Effect:
    """Effect of random controls.

    Attributes:
        difference: the published measure, mean |logits(u) - logits(no control)|, centred logits.
        loss_change: of the next-token loss.
    """

    difference: float
    divergence: float
    loss_change: float


@dataclass(frozen=True)
class Reader:
    """Evaluates changes of a trained model.

    Attributes:
        loss: of a model on `report_batches` of the part `report`. example: some of that text."""

    model: NeuralOdeLMHeadModel
    loss: Callable[[NeuralOdeLMHeadModel], float]
    example: LmExample

    @functools.cached_property
    def _trained(self) -> np.ndarray:
        return centred_logits(self.model, self.example.tokens)

    def read(self, other: NeuralOdeLMHeadModel, **how: Any) -> Changed:
        moved = divergence(centred_logits(other, self.example.tokens), self._trained)
        return Changed(self.loss(other), moved, displacement(other, self.example), **how)

    def by_solvers(self, solvers: Sequence[str], steps: Sequence[int]) -> list[Changed]:
        """Evaluations with each solver at each number of steps."""
        found = []
        for solver, n in itertools.product(solvers, steps):
            other = self.model.with_depth(self.model.config.depth.on_grid(n, solver=solver))
            found.append(self.read(other, solver=solver, steps=n, evaluations=other.config.plan.evaluations))
        return found

    def refined(self, factors: Sequence[int], coarse: Sequence[int] = ()) -> Refined:
        """The middle in steps of 1/m of the trained length, for each factor m; in `coarse` Euler steps; without it."""
        gone, finer = self.read(left_out(self.model)), [self.read(refine(self.model, m), factor=m) for m in factors]
        shares = (
            [dataclasses.replace(r, share=r.divergence / (gone.divergence or math.inf)) for r in found]
            for found in (finer, self.by_solvers(["euler"], coarse))
        )
        return Refined(displacement(self.model, self.example), gone, *shares)


def refine(model: NeuralOdeLMHeadModel, m: int) -> NeuralOdeLMHeadModel:
    """The same middle in Euler steps of 1/m of the trained length; ordinary layers are applied m times each."""
    flow = model.transformer.flow
    if not isinstance(flow.weights, PerLayer):
        return model.with_depth(model.config.depth.on_grid(m * flow.plan.steps))
    grid = dataclasses.replace(flow.plan.grid, steps=m * flow.plan.steps)
    plan = dataclasses.replace(flow.plan, grid=grid, step=flow.plan.step / m)
    weights = flow.weights.copied(np.repeat(np.arange(flow.plan.steps), m), plan.times)
    return eqx.tree_at(_FLOW, model, dataclasses.replace(flow, weights=weights, plan=plan))


def left_out(model: NeuralOdeLMHeadModel) -> NeuralOdeLMHeadModel:
    """The model with x(1) = x(0): steps of length 0."""
    flow = model.transformer.flow
    return eqx.tree_at(_FLOW, model, dataclasses.replace(flow, plan=dataclasses.replace(flow.plan, step=0.0)))


def control_effect(model: NeuralOdeLMHeadModel, tokens: NamedArray, draws: int, *, key: jax.Array) -> Effect:
    """Means over `draws` random controls u ~ N(0, 1), one for each sequence of `tokens` {batch, position}."""
    Control = Axis(CONTROL, model.config.control.dim)
    plain = centred_logits(model, tokens)
    targets = np.asarray(tokens.rearrange(("batch", "position")).array)
    found = []
    for one in jax.random.split(key, draws):
        control = hax.random.normal(one, (tokens.resolve_axis("batch"), Control))
        heard = centred_logits(model, tokens, control)
        change = _loss(heard, targets) - _loss(plain, targets)
        found.append((np.abs(heard - plain).mean(), divergence(heard, plain), change))
    return Effect(*np.mean(found, axis=0).tolist())


def centred_logits(model: NeuralOdeLMHeadModel, tokens: NamedArray, control: NamedArray | None = None) -> np.ndarray:
    """Logits [batch, position, vocab] minus their mean over the vocabulary."""
    return np.asarray(_centred(model, tokens, control))


def divergence(logits: np.ndarray, reference: np.ndarray) -> float:
    """||l - l_0|| / ||l_0|| over all entries."""
    return float(np.linalg.norm(logits - reference) / np.linalg.norm(reference))


@eqx.filter_jit
def _centred(model: NeuralOdeLMHeadModel, tokens: NamedArray, control: NamedArray | None) -> jax.Array:
    logits = model(tokens, control=control).rearrange((..., "position", "vocab")).array.astype(jnp.float32)
    return logits - logits.mean(-1, keepdims=True)


def _loss(logits: np.ndarray, tokens: np.ndarray) -> float:
    """Mean next-token loss, nats per token."""
    told = np.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    return float((logsumexp(logits[:, :-1], -1) - told).mean())
