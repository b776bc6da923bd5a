"""An optimizer of Levanter works with a model, or is refused before any work."""

import jax
import jax.numpy as jnp
import pytest
from levanter.optim import MuonConfig, OptimizerConfig
from levanter.optim.namo import NamoConfig
from levanter.trainer_state import trainables_only
from support.models import VOCAB, build, small_config

from qkvflow.errors import UserError
from qkvflow.runs.config import TrainConfig
from qkvflow.training.optimizer import working_optimizer


def config(optimizer: OptimizerConfig, weights: str) -> TrainConfig:
    return TrainConfig(model=small_config(weights=weights), optimizer=optimizer, vocab_size=VOCAB.size)


@pytest.mark.parametrize("weights", ["per_layer", "modulated"])
def test_muon_is_accepted_where_it_makes_a_step(weights):
    refused = config(MuonConfig(), weights)
    with pytest.raises(UserError, match=r"type: muon.*muon needs `use_kimi_scaling: true`"):
        working_optimizer(refused)
    accepted = config(MuonConfig(use_kimi_scaling=True, warmup=0), weights)
    optimizer = working_optimizer(accepted)
    params = trainables_only(build(accepted.model), True)
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(updates))


@pytest.mark.parametrize(
    ("optimizer", "weights"),
    [
        (MuonConfig(use_kimi_scaling=True), "generated"),
        (MuonConfig(use_kimi_scaling=True), "basis"),
        (NamoConfig(), "generated"),
    ],
)
def test_matrices_that_are_functions_of_time_are_not_orthogonalised(optimizer, weights):
    refused = config(optimizer, weights)
    with pytest.raises(UserError, match=r"fails with this model .*type: adam"):
        working_optimizer(refused)


@pytest.mark.parametrize("name", ["kron", "mars"])
def test_what_fails_with_every_model_is_refused(name):
    refused = config(OptimizerConfig.get_choice_class(name)(), "constant")
    with pytest.raises(UserError, match=rf"type: {name}.* fails with this model"):
        working_optimizer(refused)
