"""The configurations of `configs/`."""

from pathlib import Path

from qkvflow.cli import parse
from qkvflow.runs.config import TrainConfig

ROOT = Path(__file__).parents[2]
FINETUNES = [p for p in sorted((ROOT / "configs" / "finetune").glob("*.yaml")) if not p.stem.startswith("pretrain")]
MESHES = sorted((ROOT / "configs" / "mesh").glob("*.yaml"))
TARGETS = ROOT / "configs" / "targets.yaml"
FILES = [p for p in sorted((ROOT / "configs").rglob("*.yaml")) if p not in (*FINETUNES, *MESHES, TARGETS)]
IDS = [str(p.relative_to(ROOT / "configs")) for p in FILES]
# Command-line words that complete a training configuration.
TINY = ["--model", "{type: neuralode, hidden_dim: 8, max_seq_len: 16, block: {type: gpt2, num_heads: 2}}"]


def config_of(path) -> TrainConfig:
    return parse(TrainConfig, ["--config_path", str(path)])[0]
