"""Eight virtual devices, weights of heads and MLP divided over them: the loss and gradients of one device."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import equinox as eqx, haliax as hax, jax, jax.numpy as jnp, numpy as np
from support.models import VOCAB, llama, random_tokens, small_config
from haliax.partitioning import named_jit
from levanter.models.lm_model import LmExample
from levanter.trainer import TrainerConfig
from levanter.utils.mesh import MeshConfig

assert jax.device_count() == 8
model = small_config(block=llama("official", num_heads=4, num_kv_heads=2)).build(VOCAB, key=jax.random.PRNGKey(0))
tokens = random_tokens(batch=8)
weight = LmExample.causal_loss_mask(tokens.resolve_axis("position")).broadcast_axis(tokens.resolve_axis("batch"))
example = LmExample(tokens=tokens, loss_weight=weight.astype(jnp.float32), attn_mask=None)


def loss(model, example):
    return model.compute_next_token_loss(example).scalar()


reference = jax.tree.leaves(eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, example))
# More devices than key-value heads too: these then stay whole.
for mapping, devices in (({"heads": "model", "kv_head": "model"}, 2), ({"heads": "model"}, 4)):
    trainer = TrainerConfig(mesh=MeshConfig(axes={"model": devices}, shared_mapping={"mlp": "model", **mapping}))

    def sharded(model, example):
        with hax.axis_mapping(trainer.compute_axis_mapping):
            return loss(model, example)

    with trainer.use_device_mesh():
        step = named_jit(eqx.filter_value_and_grad(sharded), axis_resources=trainer.parameter_axis_mapping)
        placed = hax.shard(model, trainer.parameter_axis_mapping)
        attention = placed.transformer.flow.weights.self_attn
        assert "model" in attention.q_proj.leaves.weight.base.array.sharding.spec
        assert ("kv_head" in mapping) == ("model" in attention.k_proj.leaves.weight.base.array.sharding.spec)
        found = jax.tree.leaves(step(placed, example))
    for ours, expected in zip(found, reference, strict=True):
        expected = np.asarray(expected)
        # fp32 sums in another order; the largest entry sets the scale
        assert np.abs(np.asarray(ours) - expected).max() <= 1e-5 * max(np.abs(expected).max(), 1e-6)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.program
def test_llama_over_eight_devices():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": "tests:."}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=os.environ | flags, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
