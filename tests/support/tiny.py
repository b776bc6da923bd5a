"""A tiny training configuration of train_lm, by default of a flow."""

from pathlib import Path

FLOW = {
    "type": "neuralode",
    "max_seq_len": 32,
    "hidden_dim": 16,
    "block": {"type": "gpt2", "num_heads": 2},
    "weights": {"type": "generated", "time_embed_dim": 4, "sinusoidal_dim": 4},
    "depth": {"steps": 2},
}


def tiny(folder: Path, name: str, model: dict = FLOW, **trainer) -> dict:
    """The run `name` below `folder`; two steps by default. trainer: keys of that section."""
    return {
        "model": model,
        "data": {"cache_dir": str(folder / "cache")},
        "run_dir": str(folder / "runs"),
        "trainer": {"id": name, "train_batch_size": 2, "num_train_steps": 2, "max_eval_batches": 1} | trainer,
    }
