"""A training step of the neural ODE transformer against Levanter's GPT-2 of the same shape, same optimizer and data.

Weights per layer (the ordinary transformer in our code) stands between them: what is lost there is overhead of ours,
what is lost beyond it is the price of generating the weights.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from levanter.layers.attention import AttentionMask
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmExample

from experiments.bench.timing import interleaved, report
from qkvflow.blocks import Gpt2BlockConfig
from qkvflow.depth import DepthConfig
from qkvflow.models import NeuralOdeConfig
from qkvflow.weights import GeneratedConfig, PerLayerConfig

WIDTH, HEADS, LAYERS, SEQUENCE, BATCH = 256, 4, 6, 128, 8
Vocab = hax.Axis("vocab", 257)


def models():
    """Name -> configuration."""

    def ode(weights, solver="euler", **depth):
        return NeuralOdeConfig(
            max_seq_len=SEQUENCE,
            hidden_dim=WIDTH,
            block=Gpt2BlockConfig(num_heads=HEADS),
            weights=weights,
            depth=DepthConfig(solver=solver, steps=LAYERS, **depth),
        )

    generated = GeneratedConfig(time_embed_dim=64, sinusoidal_dim=32)
    return {
        "levanter gpt2": Gpt2Config(max_seq_len=SEQUENCE, hidden_dim=WIDTH, num_heads=HEADS, num_layers=LAYERS),
        "per layer": ode(PerLayerConfig()),
        "generated, in scan": ode(generated, evaluate="in_scan"),
        "generated, batched": ode(generated, evaluate="batched"),
        "generated, rk4": ode(generated, solver="rk4"),
    }


def example(sequence: int = SEQUENCE, batch: int = BATCH) -> LmExample:
    Batch, Pos = hax.Axis("batch", batch), hax.Axis("position", sequence)
    tokens = hax.random.randint(jax.random.PRNGKey(0), (Batch, Pos), 0, Vocab.size)
    weight = LmExample.causal_loss_mask(Pos).astype(jnp.float32).broadcast_axis(Batch)
    return LmExample(tokens=tokens, loss_weight=weight, attn_mask=AttentionMask.causal())


def gradient(config, batch: int = BATCH):
    """A call that computes loss and gradients once, at the model's full length."""
    params, static = eqx.partition(config.build(Vocab, key=jax.random.PRNGKey(0)), eqx.is_inexact_array)
    data = example(config.max_seq_len, batch)
    compute = jax.jit(jax.value_and_grad(lambda p: eqx.combine(p, static).compute_next_token_loss(data).scalar()))
    return lambda: compute(params)


def step(config):
    """A call that takes one whole Adam step, buffers donated."""
    params, static = eqx.partition(config.build(Vocab, key=jax.random.PRNGKey(0)), eqx.is_inexact_array)
    data, optimizer = example(), optax.adamw(1e-4)

    def update(carry):
        params, state = carry
        loss, grads = jax.value_and_grad(lambda p: eqx.combine(p, static).compute_next_token_loss(data).scalar())(
            params
        )
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    compute = jax.jit(update, donate_argnums=0)
    carry = [(params, optimizer.init(params))]

    def run():
        carry[0], loss = compute(carry[0])
        return carry[0], loss

    return run


def main(rounds: int = 15) -> None:
    settings = {
        "width": WIDTH,
        "heads": HEADS,
        "layers": LAYERS,
        "sequence": SEQUENCE,
        "batch": BATCH,
        "T": 64,
        "S": 32,
    }
    for name, make in (("forward_backward", gradient), ("training_step", step)):
        rows = interleaved({k: make(c) for k, c in models().items()}, rounds, reference="levanter gpt2")
        report(name, settings, rows)


if __name__ == "__main__":
    main()
