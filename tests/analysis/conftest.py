"""Runs that the programs of the analysis are tried on."""

import pytest
from support.tiny import FLOW, tiny

from qkvflow.config import decode
from qkvflow.runs.config import TrainConfig
from qkvflow.train_lm import main as train

KEPT = {"num_train_steps": 3, "checkpointer": {"save_interval": "1h", "keep": [{"every": 1}]}}
SHORT = {"type": "gpt2", "max_seq_len": 16, "hidden_dim": 16, "num_heads": 2, "num_layers": 2}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A flow, and one of Levanter's models with a shorter context; three steps of training, a checkpoint after two."""
    folder = tmp_path_factory.mktemp("analysis")

    def run(name, model):
        return train(decode(TrainConfig, tiny(folder, name, model, **KEPT)))

    return run("flow", FLOW), run("ordinary", SHORT)
