"""A training step of the neural ODE transformer against Levanter's GPT-2 of the same shape, same optimizer and data.

Weights per layer (the ordinary transformer in our code) stands between them: what is lost there is overhead of ours,
what is lost beyond it is the price of generating the weights.
"""

import jax
import optax
from levanter.models.gpt2 import Gpt2Config

from experiments.bench.models import GENERATED, HEADS, flow, gradient, loss
from experiments.bench.timing import interleaved, report
from qkvflow.weights import PerLayerConfig

WIDTH, LAYERS, SEQUENCE, BATCH = 256, 6, 128, 8
MODELS = {
    "levanter gpt2": Gpt2Config(max_seq_len=SEQUENCE, hidden_dim=WIDTH, num_heads=HEADS, num_layers=LAYERS),
    "per layer": flow(WIDTH, SEQUENCE, PerLayerConfig(), steps=LAYERS),
    "generated, in scan": flow(WIDTH, SEQUENCE, steps=LAYERS, evaluate="in_scan"),
    "generated, batched": flow(WIDTH, SEQUENCE, steps=LAYERS, evaluate="batched"),
    "generated, rk4": flow(WIDTH, SEQUENCE, steps=LAYERS, solver="rk4"),
}


def step(config, batch: int):
    """A call that takes one whole Adam step, buffers donated."""
    (compute, params), optimizer = loss(config, batch), optax.adamw(1e-4)

    def update(carry):
        params, state = carry
        value, grads = compute(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    compiled, carry = jax.jit(update, donate_argnums=0), [(params, optimizer.init(params))]

    def run():
        carry[0], value = compiled(carry[0])
        return carry[0], value

    return run


def main(rounds: int = 15) -> None:
    settings = {"width": WIDTH, "heads": HEADS, "layers": LAYERS, "sequence": SEQUENCE, "batch": BATCH}
    settings |= {"T": GENERATED.time_embed_dim, "S": GENERATED.sinusoidal_dim}
    for name, make in (("forward_backward", gradient), ("training_step", step)):
        rows = interleaved({name: make(c, BATCH) for name, c in MODELS.items()}, rounds, reference="levanter gpt2")
        report(name, settings, rows)


if __name__ == "__main__":
    main()
