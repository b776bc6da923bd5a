"""Initial scales of generated weights, in one table (tests/weights/test_scales.py checks it against samples).

W(t) = base + e(t).P,  b(t) = e(t).F,  gain(t) = 1 + e(t).G,  e(t) = lin2(silu(lin1(phi(t)))).

| parameter                  | official         | matched                                              |
|----------------------------|------------------|------------------------------------------------------|
| lin1.weight                | N(0, 0.02^2)     | N(0, 2 / (2S+1))                                     |
| lin2.weight                | N(0, 0.02^2)     | N(0, 1 / T)                                          |
| lin1.bias, lin2.bias       | 0                | 0                                                    |
| P (of weights)             | N(0, 0.02^2)     | N(0, r s^2 / mean |e(t)|^2), s: std of ordinary init |
| base                       | 0                | sqrt(1 - r) times a draw of the ordinary layer       |
| F (of biases)              | N(0, 0.0001^2)   | 0                                                    |
| G, F (of norms)            | 0                | 0                                                    |
| other leaves: base, P      | ordinary, 0      | ordinary value, 0                                    |
| token embeddings, tied     | N(0, 0.02^2)     | N(0, 0.02^2)                                         |
| token embeddings, own head | N(0, 1)          | N(0, 0.02^2)                                         |
| lm_head                    | N(0, 0.02^2)     | the ordinary layer: truncated N(0, 1 / d)            |
| position embeddings        | N(0, 0.01^2)     | N(0, 0.01^2)                                         |

`official` is what the official code draws with the Haliax 1.3 that it was written for (newer versions of Haliax
scale by fan-in). There W(t) starts with a standard deviation near 1e-4, so that every block first does almost nothing.
`matched` gives W(t) the standard deviation of the ordinary layer that it replaces, at every t; the share
r = TIME_SHARE of its variance depends on time, the rest is common to all depths. Parameters of modules other than
Linear and norms (rates and steps of a state-space model) mean something by themselves, so they start as ordinary ones.

Modulated weights W(t) = W g(t), g = sigmoid(s(t)) or 1 + tanh(s(t)), s(t) = lin2(silu(lin1(phi(t)))) per gate:

| parameter           | sigmoid                                             | film            |
|---------------------|-----------------------------------------------------|-----------------|
| lin1.weight         | N(0, 2 / (2S+1))                                    | the same        |
| lin2.weight         | N(0, GATE_LOGITS^2 / H): s(t) has deviation near 0.1| 0: g(t) = 1     |
| lin1.bias, lin2.bias| 0                                                   | 0               |
| W                   | ordinary value times 2 for each gate, as g is near 1/2 | ordinary value |
"""

from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
from haliax import Axis, AxisSpec

TOKEN_EMBEDDING = 0.02
POSITION_EMBEDDING = 0.01
TIME_SHARE = 0.1
GATE_LOGITS = {"sigmoid": 0.2, "film": 0.0}


@dataclass(frozen=True)
class GeneratedScales:
    """Standard deviations for `weights: generated`; None means: matched to the ordinary layer.

    Attributes:
        untied_embedding, head: of the token embeddings and the head of a model whose head is its own (Llama).
    """

    lin1: float | None
    lin2: float | None
    projection: float | None
    bias: float
    untied_embedding: float
    head: float | None


PRESETS: dict[str, GeneratedScales] = {
    "official": GeneratedScales(lin1=0.02, lin2=0.02, projection=0.02, bias=1e-4, untied_embedding=1.0, head=0.02),
    "matched": GeneratedScales(
        lin1=None, lin2=None, projection=None, bias=0.0, untied_embedding=TOKEN_EMBEDDING, head=None
    ),
}


def normal_linear(In: Axis, Out: AxisSpec, std: float, *, key) -> hnn.Linear:
    """A Linear with weights N(0, std^2) and zero bias."""
    linear = hnn.Linear.init(In, Out, key=key, out_first=False)
    return eqx.tree_at(lambda m: m.weight, linear, hax.random.normal(key, linear.weight.axes) * std)
