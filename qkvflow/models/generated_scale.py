"""Learning rates of generated weights: updates of the projections P divided by the sum of |e(t)|.

    W(t) = base + sum_j e_j(t) P_j

Adam moves every entry of P by about the rate, and so W(t) by the rate times sum_j |e_j(t)|. That sum grows with T
(about T / 2 with `init: matched`): so the best rate of a generated model depends on T, and a rate that suits ordinary
matrices makes W(t) unstable. After division by the sum, W(t) moves as far as an ordinary matrix, for every T. This is
the idea of muP (Yang and Hu, arXiv 2011.14522: the rate of a layer follows from how far its steps move what it
computes) for weights that networks produce.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from qkvflow.axes import LAYERS, TIME_EMBED
from qkvflow.errors import UserError
from qkvflow.time import grid
from qkvflow.weights.generated import Generated, Leaf

CHOICES = ("sum_e", "none")
_TIMES = grid(np.linspace(0.0, 1.0, 33))


def check_choice(choice: str) -> None:
    """Raises:
    UserError: if there is no such choice.
    """
    if choice not in CHOICES:
        raise UserError(f"generated_scale: {choice!r} is not known. Choices: {', '.join(CHOICES)}.")


def sum_of_features(weights: Generated) -> jax.Array:
    """The mean over t in [0, 1] of sum_j |e_j(t)|, fp32; at the frozen time if there is one."""
    e = weights.net(_TIMES if weights.frozen_time is None else grid([weights.frozen_time]))
    return hax.mean(hax.sum(hax.abs(e), TIME_EMBED), LAYERS).array


def scale_generated() -> optax.GradientTransformation:
    """Divides the updates of all projections by `sum_of_features` of their time network, as it is at each step."""

    def update(updates, state, params):
        def scaled(update, param):
            if not isinstance(param, Generated):
                return update
            factor = 1 / sum_of_features(param)

            def one(leaf: Leaf) -> Leaf:
                if leaf.projection is None:
                    return leaf
                return eqx.tree_at(lambda x: x.projection, leaf, leaf.projection * factor.astype(jnp.float32))

            leaves = jax.tree.map(one, update.leaves, is_leaf=lambda x: isinstance(x, Leaf))
            return eqx.tree_at(lambda x: x.leaves, update, leaves)

        return jax.tree.map(scaled, updates, params, is_leaf=lambda x: isinstance(x, Generated)), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
