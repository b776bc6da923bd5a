"""What is trained: the runs of the experiment in their order, as configurations of train_lm and finetune_lm."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.texts import Text


@dataclass(frozen=True)
class Scale:
    """
    width, heads, layers, sequence, batch: of both models; `layers` is the number of steps the flow is trained with.
    time_embed_dim, sinusoidal_dim: of the flow's weights.
    depths: M, the numbers of steps at which the flow is tuned.
    pretrain, tune: numbers of training steps.
    evaluations: how often the loss is read during tuning; eval_batches: of how many batches.
    report_batches: of how many batches the reported loss is.
    seeds: how many times all is done.
    both_ways: from the first text to the second and back.
    rank, alpha: of LoRA; pretrain_rate, full_rate, lora_rate: learning rates.
    """

    width: int = 128
    heads: int = 4
    layers: int = 6
    sequence: int = 128
    batch: int = 8
    time_embed_dim: int = 16
    sinusoidal_dim: int = 32
    depths: tuple[int, ...] = (8, 6, 4, 3)
    pretrain: int = 800
    tune: int = 240
    evaluations: int = 6
    eval_batches: int = 24
    report_batches: int = 96
    seeds: int = 3
    both_ways: bool = True
    rank: int = 16
    alpha: float = 32.0
    pretrain_rate: float = 2e-3
    full_rate: float = 1e-3
    lora_rate: float = 3e-3


SMOKE = Scale(
    width=32,
    heads=2,
    layers=3,
    sequence=64,
    batch=8,
    time_embed_dim=6,
    sinusoidal_dim=8,
    depths=(4, 2),
    pretrain=40,
    tune=24,
    evaluations=3,
    eval_batches=4,
    report_batches=8,
    seeds=2,
    both_ways=False,
    rank=4,
    alpha=8.0,
)


@dataclass(frozen=True)
class Job:
    """One training.

    system: `flow` or `gpt2`. kind: `pretrain`, `full`, `lora` or `scratch`. depth: M; None for a model of one depth.
    source, target: names of the texts; a training without a base has none as `source`.
    config: what train_lm or finetune_lm is given.
    """

    system: str
    kind: str
    depth: int | None
    source: str | None
    target: str
    seed: int
    config: dict[str, Any]

    @property
    def is_finetune(self) -> bool:
        return self.kind in ("full", "lora")

    @property
    def name(self) -> str:
        return self.config["trainer"]["id"]


def planned_jobs(texts: list[Text], scale: Scale, run_dir: Path) -> Iterator[Job]:
    """All trainings, bases before what is made from them, a whole seed before the next."""
    ways = [(texts[0], texts[1]), (texts[1], texts[0])][: 1 + scale.both_ways]
    for seed in range(scale.seeds):
        for source, target in ways:
            yield from _one_way(source, target, seed, scale, run_dir)


def _one_way(source: Text, target: Text, seed: int, scale: Scale, run_dir: Path) -> Iterator[Job]:
    bases = {}
    for system in ("flow", "gpt2"):
        name = bases[system] = f"{source.name}-{system}-{seed}"
        model, rate = _model(system, scale), scale.pretrain_rate
        config = {"model": model, **_common(source, name, seed, scale.pretrain, rate, scale, run_dir)}
        yield Job(system, "pretrain", None, None, source.name, seed, config)
    scratch = f"{target.name}-gpt2-scratch-{seed}"
    config = _common(target, scratch, seed, scale.tune, scale.pretrain_rate, scale, run_dir)
    yield Job("gpt2", "scratch", None, None, target.name, seed, {"model": _model("gpt2", scale), **config})
    for kind, rate in (("full", scale.full_rate), ("lora", scale.lora_rate)):
        mode: dict[str, Any] = {"type": kind}
        if kind == "lora":
            mode |= {"r": scale.rank, "alpha": scale.alpha, "train_embeddings": True}
        for system, depth in [("gpt2", None), *(("flow", depth) for depth in scale.depths)]:
            name = f"{source.name}-{target.name}-{system}{depth or ''}-{kind}-{seed}"
            config = _common(target, name, seed, scale.tune, rate, scale, run_dir)
            config |= {"run": str(run_dir / bases[system]), "steps": depth, "mode": mode}
            yield Job(system, kind, depth, source.name, target.name, seed, config)


def _model(system: str, scale: Scale) -> dict[str, Any]:
    """GPT-2 is Levanter's own; the flow is the paper's, with as many steps as GPT-2 has layers."""
    sizes = {"max_seq_len": scale.sequence, "hidden_dim": scale.width}
    if system == "gpt2":
        no_dropout = {"embed_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
        return {"type": "gpt2", **sizes, "num_heads": scale.heads, "num_layers": scale.layers, **no_dropout}
    weights = {"time_embed_dim": scale.time_embed_dim, "sinusoidal_dim": scale.sinusoidal_dim}
    return {
        "type": "neuralode",
        **sizes,
        "block": {"type": "gpt2", "num_heads": scale.heads, "form": "parallel"},
        "weights": {"type": "generated", **weights},
        "depth": {"solver": "euler", "steps": scale.layers, "endpoint": "right"},
    }


def _common(text: Text, name: str, seed: int, steps: int, rate: float, scale: Scale, run_dir: Path) -> dict[str, Any]:
    return {
        "run_dir": str(run_dir),
        "data": {
            "tokenizer": "byte",
            "train": text.file("train"),
            "validation": text.file("select"),
            "cache_dir": str(run_dir / "cache"),
        },
        "trainer": {
            "id": name,
            "seed": seed,
            "train_batch_size": scale.batch,
            "num_train_steps": steps,
            "steps_per_eval": max(1, steps // scale.evaluations),
            "max_eval_batches": scale.eval_batches,
            "checkpointer": {"save_interval": "2m", "keep": []},
        },
        "optimizer": {"learning_rate": rate, "warmup": 0.05, "min_lr_ratio": 0.1, "weight_decay": 0.1},
    }


def settings(scale: Scale) -> dict[str, Any]:
    """The scale as plain data."""
    return asdict(scale)
