"""Time-indexed SSMs against the time-indexed MLP: training gradients at two lengths, and how time grows with length.

The mixer alone is measured for growth: attention, which every block has, is quadratic by itself.
"""

import equinox as eqx
import haliax as hax
import jax

from experiments.bench.models import HEADS, flow, gradient
from experiments.bench.timing import interleaved, report
from qkvflow.blocks import Gpt2BlockConfig, SsmBlockConfig, SsmMixer
from qkvflow.weights import ModulatedConfig

SETTINGS = {"width": 256, "heads": HEADS, "layers": 6, "tokens": 1024}
BLOCKS = {
    "time-indexed MLP": Gpt2BlockConfig(num_heads=HEADS, form="sequential"),
    "SSM, 16 states": SsmBlockConfig(num_heads=HEADS, form="sequential", state_size=16),
    "SSM, 64 states": SsmBlockConfig(num_heads=HEADS, form="sequential", state_size=64),
    "selective, 16 states": SsmBlockConfig(num_heads=HEADS, form="sequential", state_size=16, selective=True),
}
WEIGHTS = ModulatedConfig(hidden_dim=64, sinusoidal_dim=32)


def mixer_gradient(sequence: int, *, state_size: int = 16, selective: bool):
    """A call that computes the gradient of one mixer, for one sequence."""
    Embed, Pos = hax.Axis("embed", SETTINGS["width"]), hax.Axis("position", sequence)
    key = jax.random.PRNGKey(0)
    mixer = SsmMixer.init(Embed, hax.Axis("state", state_size), selective=selective, key=key)
    x = hax.random.normal(key, (hax.Axis("batch", 1), Pos, Embed))
    compute = eqx.filter_jit(eqx.filter_grad(lambda both: hax.mean(hax.square(both[0](both[1], None))).array))
    return lambda: compute((mixer, x))


def main(rounds: int = 15) -> None:
    width, depth = SETTINGS["width"], {"steps": SETTINGS["layers"], "step_size": "residual"}
    for sequence in (128, 1024):
        batch = SETTINGS["tokens"] // sequence
        runs = {name: gradient(flow(width, sequence, WEIGHTS, block, **depth), batch) for name, block in BLOCKS.items()}
        rows = interleaved(runs, rounds, reference="time-indexed MLP")
        report(f"ssm_{sequence}", SETTINGS | {"sequence": sequence, "batch": batch}, rows)
    for selective in (False, True):
        runs = {str(n): mixer_gradient(n, selective=selective) for n in (512, 1024, 2048, 4096)}
        rows = interleaved(runs, rounds, reference="512")
        kind = "selective" if selective else "time_invariant"
        report(f"ssm_growth_{kind}", {"width": width, "states": 16, "batch": 1}, rows)


if __name__ == "__main__":
    main()
