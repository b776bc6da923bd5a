"""`weights: per_layer`: independent weights for each point of a time grid, i.e. an ordinary stack of layers.

W(t_k) = W_k for the times t_k of the grid, undefined between them. Discretisation produces these: `at` of generated
weights on a grid, frozen.
"""

from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from haliax.nn.scan import Stacked

from qkvflow.axes import LAYERS
from qkvflow.errors import UserError
from qkvflow.named import map_named
from qkvflow.time import Grid, GridPoint, Time, as_time
from qkvflow.weights.base import TimeDependent

_SAME_TIME = 1e-9  # two times of [0, 1] closer than this are the same point of a grid


class PerLayer(TimeDependent):
    """Ordinary weights at the times `times` (float in [0, 1]), stacked along the axis `layers`."""

    blocks: Stacked  # leaves {layers, ...}
    times: tuple[float, ...] = eqx.field(static=True)

    @staticmethod
    def stack(stacked, times: tuple[float, ...]) -> "PerLayer":
        """From a module whose arrays carry the axis `layers`, as `at` returns it."""
        return PerLayer(
            Stacked(stacked, Axis(LAYERS, len(times)), hax.ScanCheckpointPolicy.from_bool_or_str(True)), times
        )

    def copied(self, rows: Sequence[int], times: tuple[float, ...]) -> "PerLayer":
        """These layers at other times, some of them more than once: at `times[k]` stands a copy of layer `rows[k]`."""
        taken = hax.named(jnp.asarray(rows), "_copy")
        stacked = map_named(lambda a: hax.take(a, LAYERS, taken).rename({"_copy": LAYERS}), self.blocks.stacked)
        return PerLayer.stack(stacked, times)

    @staticmethod
    def init(init_block, times: tuple[float, ...], *, key) -> "PerLayer":
        """`init_block(key=...)` makes one ordinary block; each time gets its own draw."""
        Layers = Axis(LAYERS, len(times))
        stacked = hax.vmap(init_block, Layers)(key=jax.random.split(key, Layers.size))
        return PerLayer.stack(stacked, times)

    def at(self, t: Time):
        t = as_time(t)
        if not isinstance(t, (Grid, GridPoint)):
            raise UserError(
                "per_layer weights only exist at their own times, so they cannot be evaluated at a time that is only"
                " known at run time (adaptive steps, jitter). Use a fixed grid, or weights that are functions of time."
            )
        rows = self._rows(t.values)
        stacked = self.blocks.stacked
        if isinstance(t, GridPoint):
            return map_named(lambda a: a[LAYERS, jnp.asarray(rows)[t.index]], stacked)
        if t.axis is None:
            return map_named(lambda a: a[LAYERS, int(rows[0])], stacked)
        if rows.tolist() == list(range(self.blocks.Block.size)) and t.axis == self.blocks.Block:
            return stacked
        return map_named(lambda a: hax.take(a.rename({LAYERS: "_from"}), "_from", hax.named(rows, t.axis)), stacked)

    def rate(self, t: Time):
        raise UserError(
            "per_layer weights are not functions of time: they only exist at their own times and have no rate of"
            " change. Use weights that are functions of time (generated, modulated, basis, constant)."
        )

    @property
    def flops(self) -> float:
        """Nothing is computed: the weights are there."""
        return 0.0

    def _rows(self, values: tuple[float, ...]) -> np.ndarray:
        distance = np.abs(np.asarray(values)[:, None] - np.asarray(self.times)[None, :])
        rows = distance.argmin(axis=1)
        missing = distance.min(axis=1) > _SAME_TIME
        if missing.any():
            raise UserError(
                f"per_layer weights have no value at t = {np.asarray(values)[missing][0]:.6g}: they exist at"
                f" {len(self.times)} times, {self.times[0]:.6g} to {self.times[-1]:.6g}. An ordinary stack has one"
                " depth; to change the depth, train weights that are functions of time (generated, basis,"
                " modulated, constant)."
            )
        return rows
