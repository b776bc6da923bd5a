"""Levanter's rotary positions: what numbers mean together, which its own classes do not check."""

from levanter.layers.rotary import Llama3RotaryEmbeddingsConfig, RotaryEmbeddingsConfig, YarnRotaryEmbeddingsConfig

from qkvflow.errors import UserError


def check_rope(rope: RotaryEmbeddingsConfig) -> None:
    """Checks what numbers in range mean together: the ramp between kept and interpolated frequencies must ascend.

    Raises:
        UserError: an empty or descending ramp, or YaRN without frequencies that differ.
    """
    if isinstance(rope, Llama3RotaryEmbeddingsConfig):
        low, high = rope.low_freq_factor, rope.high_freq_factor
        if not low < high:
            raise UserError(f"rope: low_freq_factor ({low:g}) must be below high_freq_factor ({high:g}).")
    if isinstance(rope, YarnRotaryEmbeddingsConfig):
        if not rope.theta > 1:
            raise UserError(
                f"rope: theta ({rope.theta:g}) must be above 1 with type yarn, which divides by its logarithm."
            )
        if not rope.beta_slow < rope.beta_fast:
            raise UserError(f"rope: beta_slow ({rope.beta_slow:g}) must be below beta_fast ({rope.beta_fast:g}).")
