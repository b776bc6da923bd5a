"""Initial scales of generated weights, in one table (tests/test_scales.py checks it against samples).

W(t) = base + e(t).P,  b(t) = e(t).F,  gain(t) = 1 + e(t).G,  e(t) = lin2(silu(lin1(phi(t)))).

| parameter           | official                | matched                                              |
|---------------------|-------------------------|------------------------------------------------------|
| lin1.weight         | N(0, 0.02^2)            | N(0, 2 / (2S+1))                                     |
| lin2.weight         | N(0, 0.02^2)            | N(0, 1 / T)                                          |
| lin1.bias, lin2.bias| 0                       | 0                                                    |
| P (of weights)      | N(0, 0.02^2)            | N(0, r s^2 / mean |e(t)|^2), s: std of ordinary init |
| base                | 0                       | sqrt(1 - r) times a draw of the ordinary layer       |
| F (of biases)       | N(0, 0.0001^2)          | 0                                                    |
| G (of norm gains)   | 0                       | 0                                                    |
| token embeddings    | N(0, 0.02^2)            | N(0, 0.02^2)                                         |
| position embeddings | N(0, 0.01^2)            | N(0, 0.01^2)                                         |

`official` is what the official code draws with the Haliax 1.3 that it was written for (newer versions of Haliax
scale by fan-in). There W(t) starts with a standard deviation near 1e-4, so that every block first does almost nothing.
`matched` gives W(t) the standard deviation of the ordinary layer that it replaces, at every t; the share
r = TIME_SHARE of its variance depends on time, the rest is common to all depths.
"""

from dataclasses import dataclass

TOKEN_EMBEDDING = 0.02
POSITION_EMBEDDING = 0.01
TIME_SHARE = 0.1


@dataclass(frozen=True)
class GeneratedScales:
    """Standard deviations for `weights: generated`; None means: matched to the ordinary layer."""

    lin1: float | None
    lin2: float | None
    projection: float | None
    bias: float


PRESETS: dict[str, GeneratedScales] = {
    "official": GeneratedScales(lin1=0.02, lin2=0.02, projection=0.02, bias=1e-4),
    "matched": GeneratedScales(lin1=None, lin2=None, projection=None, bias=0.0),
}
