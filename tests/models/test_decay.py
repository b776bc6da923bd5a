"""Weight decay, leaf by leaf: every array has a role, and each rule decays exactly its roles."""

import equinox as eqx
import jax
import pytest
from levanter.models.gpt2 import Gpt2Config
from levanter.optim import AdamConfig
from levanter.optim.namo import NamoConfig
from support.models import VOCAB, build, llama, small_config

from qkvflow.errors import UserError
from qkvflow.models import decay


def expected_role(path: str) -> str:
    if "embeddings" in path:
        return "embedding"
    if ".net." in path:
        return "time_network"
    if "_ln." in path or "_layernorm." in path or ".norm." in path or ".ln_" in path:
        return "norm"
    return "bias" if ".bias" in path else "matrix"


def roles_by_path(model):
    roles = jax.tree_util.tree_leaves_with_path(decay.roles(eqx.filter(model, eqx.is_inexact_array)))
    return {jax.tree_util.keystr(path): role for path, role in roles}


MODELS = {
    "generated": lambda: build(small_config(prelude_layers=1)),
    "per_layer": lambda: build(small_config(weights="per_layer")),
    "llama": lambda: build(small_config(block=llama("official"), coda_layers=1)),
    "levanter_gpt2": lambda: Gpt2Config(max_seq_len=12, hidden_dim=16, num_layers=2, num_heads=2).build(
        VOCAB, key=jax.random.PRNGKey(0)
    ),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_every_leaf_has_its_role(name):
    roles = roles_by_path(MODELS[name]())
    assert len(roles) > 10
    assert roles == {path: expected_role(path) for path in roles}


@pytest.mark.parametrize("rule", [*decay.RULES])
def test_the_optimizer_decays_exactly_these_leaves(rule):
    """With zero gradients Adam moves a leaf if and only if it decays."""
    params = eqx.filter(MODELS["generated"](), eqx.is_inexact_array)
    optimizer = decay.configure(AdamConfig(learning_rate=1.0, weight_decay=0.5, warmup=0, lr_schedule="constant"), rule)
    transform = optimizer.build(10)
    zeros = jax.tree.map(lambda x: 0 * x, params)
    updates, _ = jax.jit(lambda zeros: transform.update(zeros, transform.init(zeros), params))(zeros)
    roles = roles_by_path(params)
    moved = {}
    for path, update in jax.tree_util.tree_leaves_with_path(updates, is_leaf=lambda x: hasattr(x, "axes")):
        moved[jax.tree_util.keystr(path)] = bool((update.array != 0).any())
    assert moved == {path: role in decay.RULES[rule] for path, role in roles.items()}


def test_official_rule_is_embeddings_only():
    assert decay.RULES["embeddings"] == {"embedding"}


def test_refusals():
    with pytest.raises(UserError, match="matrices_and_embeddings"):
        decay.configure(AdamConfig(), "weights")
    with pytest.raises(UserError, match="weight_decay_on: levanter"):
        decay.configure(AdamConfig(weight_decay_modules=["attn"]), "matrices")
    custom = AdamConfig(weight_decay_modules=["attn"])
    assert decay.configure(custom, "levanter") is custom


def test_namo_cannot_spare_matrices():
    with pytest.raises(UserError, match=r"weight_decay_on: none cannot keep optimizer\.type: namo"):
        decay.configure(NamoConfig(), "none")
