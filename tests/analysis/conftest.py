"""Runs that the programs of the analysis are tried on."""

import pytest

from qkvflow.config import decode
from qkvflow.runs.config import TrainConfig
from qkvflow.train_lm import main as train

FLOW = {
    "type": "neuralode",
    "max_seq_len": 32,
    "hidden_dim": 16,
    "block": {"type": "gpt2", "num_heads": 2},
    "weights": {"type": "generated", "time_embed_dim": 4, "sinusoidal_dim": 4},
    "depth": {"steps": 2},
}
KEPT = {"max_eval_batches": 1, "checkpointer": {"save_interval": "1h", "keep": [{"every": 1}]}}
SHORT = {"type": "gpt2", "max_seq_len": 16, "hidden_dim": 16, "num_heads": 2, "num_layers": 2}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A flow, and one of Levanter's models with a shorter context; three steps of training, a checkpoint after two."""
    folder = tmp_path_factory.mktemp("analysis")

    def run(name, model):
        raw = {
            "model": model,
            "data": {"cache_dir": str(folder / "cache")},
            "run_dir": str(folder / "runs"),
            "trainer": {"id": name, "train_batch_size": 2, "num_train_steps": 3} | KEPT,
        }
        return train(decode(TrainConfig, raw))

    return run("flow", FLOW), run("ordinary", SHORT)
