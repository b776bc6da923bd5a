"""What the model of a configuration costs, as sections of rows: parameters, evaluations, FLOPs, memory."""

import tempfile
from pathlib import Path

import equinox as eqx
from haliax import Axis
from levanter.models.lm_model import LmHeadModel

from qkvflow.data.tokenizers import load_tokenizer, number_of_ids, resolve_tokenizer
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeConfig, NeuralOdeLMHeadModel, cost
from qkvflow.models.levanter_twin import enter, enter_config
from qkvflow.runs.config import TrainConfig
from qkvflow.training.checks import largest_batch, model_shape, tree_bytes
from qkvflow.training.optimizer import working_optimizer
from qkvflow.training.share import TrainedShare
from qkvflow.training.start import Start
from qkvflow.units import in_bytes, scaled
from qkvflow.weights import variation

# Vocabularies whose size is known without fetching the tokenizer.
_VOCABULARY = {"byte": 257, "tiktoken:gpt2": 50257}

Value = float | int | str | None
Sections = dict[str, dict[str, Value]]


def describe(config: TrainConfig, vocab_size: int, start: Start | None = None) -> Sections:
    """What the model of a configuration costs, from shapes: section -> row -> value. None where it is not known.

    FLOPs are those of `qkvflow.models.cost`; memory is in bytes, at the precision of the trainer's parameters.

    Args:
        start: where the model comes from, if it is not drawn at random: LoRA trains little of it.
    """
    model_config, trainer = config.model, config.trainer
    length, Vocab = config.Pos.size, Axis("vocab", vocab_size)
    shape = model_shape(model_config, Vocab)
    stored = eqx.filter_eval_shape(trainer.mp.cast_to_param, shape if start is None else start.shape(Vocab))
    trainable = True if start is None else start.trainable(stored)
    share = TrainedShare.of(stored, trainable, working_optimizer(config, start))
    config_of_ours, ours = enter_config(model_config), enter(shape)
    flops = cost.flops(config_of_ours, ours, vocab_size, length)
    cache = cost.kv_cache_width(config_of_ours)
    batch = largest_batch(trainer)
    return {
        "model": {
            "kind": kind(model_config),
            "vocabulary": vocab_size,
            "tokens per sequence": length,
            "sequences per batch": batch,
        },
        "parameters": _parameters(ours),
        "parameters, discretised": _discretised(ours),
        "evaluations of the block": _evaluations(config_of_ours),
        "FLOPs per token": {
            "forward": flops and flops.forward,
            **_by_stage(config_of_ours, vocab_size, length),
            "backward": flops and flops.backward,
            "recomputed, at most": flops and flops.recomputed,
        },
        "FLOPs per batch for W(t)": {
            "forward": flops and flops.generation,
            "backward": flops and 2 * flops.generation,
            "share of the batch's forward pass": flops
            and f"{flops.generation / (flops.generation + batch * length * flops.forward):.2%}",
        },
        "memory for training": {
            "parameters": in_bytes(tree_bytes(stored)),
            "gradients": in_bytes(share.trained_bytes),
            "optimizer": in_bytes(share.optimizer_bytes),
        },
        "KV cache per token": {"bf16": cache and in_bytes(2 * cache), "fp32": cache and in_bytes(4 * cache)},
    }


def change_over_time(model: LmHeadModel) -> dict[str, Value]:
    """For each weight of the flow, or of the layers, its relative change over the times of the grid."""
    ours = enter(model)
    return {name: f"{v:.3g}" for name, v in variation(ours.transformer.flow.weights, ours.config.plan.times).items()}


def kind(config) -> str:
    """The point of weights x block x depth that a model is, in words."""
    name = config.get_choice_name(type(config))
    if not isinstance(config, NeuralOdeConfig):
        return f"{name} (Levanter)"
    parts = [p.get_choice_name(type(p)) for p in (config.weights, config.block)]
    steps = "adaptive" if config.depth.is_adaptive else f"x {config.depth.reading_steps}"
    return f"{name}: {parts[0]}, {parts[1]} {config.block.form}, {config.depth.solver} {steps}"


def vocabulary_size(config: TrainConfig) -> int:
    """Size of the vocabulary that training would use on one device.

    Raises:
        UserError: only the tokenizer knows it, and it is not available.
    """
    size = config.vocab_size or _VOCABULARY.get(config.data.tokenizer)
    if size is not None:
        return size
    with tempfile.TemporaryDirectory() as folder:
        try:
            return number_of_ids(load_tokenizer(resolve_tokenizer(config.data.tokenizer, Path(folder))))
        except UserError as error:
            raise UserError(f"{error} To describe the model without its tokenizer, give --vocab_size N.") from error


def table(columns: dict[str, Sections]) -> str:
    """Columns side by side; a row that one of them does not have is left empty there."""
    rows: dict[tuple[str, str], None] = {}
    for sections in columns.values():
        rows |= {(section, label): None for section, content in sections.items() for label in content}
    order = list(dict.fromkeys(section for section, _ in rows))
    lines = [("", *columns)]
    for section in order:
        lines.append((section, *("" for _ in columns)))
        for _, label in (row for row in rows if row[0] == section):
            cells = (sections.get(section, {}).get(label, "") for sections in columns.values())
            lines.append((f"  {label}", *map(_cell, cells)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns) + 1)]
    text = ("  ".join(f"{c:{'<' if i == 0 else '>'}{widths[i]}}" for i, c in enumerate(line)) for line in lines)
    return "\n".join(line.rstrip() for line in text)


def _evaluations(config) -> dict[str, Value]:
    rows: dict[str, Value] = {"per token": cost.evaluations(config)}
    around = config.prelude_layers + config.coda_layers
    if len(config.stages) > 1 or config.training_plans:
        each = [stage.training_plans or (stage.plan,) for stage in config.stages]
        counts = (" or ".join(str(plan.evaluations + around) for plan in plans) for plans in each)
        rows["per token, in training"] = " then ".join(counts)
    return rows


def _by_stage(config, vocab_size: int, length: int) -> dict[str, Value]:
    """Forward FLOPs of each stage of a training whose depth grows."""
    if len(config.stages) == 1:
        return {}
    flops = (stage.flops_per_token(vocab_size, length) for stage in config.stages)
    return {"forward, in training": " then ".join(_cell(float(f)) for f in flops)}


def _discretised(model: NeuralOdeLMHeadModel) -> dict[str, Value]:
    """Of the ordinary model at the flow's own depth, which adaptive steps do not have."""
    if model.config.depth.is_adaptive:
        return dict.fromkeys(_parameters(model))
    return _parameters(cost.discretised(model))


def _parameters(shape) -> dict[str, Value]:
    counts = {group: n for group, n in cost.parameters_by_group(shape).items() if n or group != "other"}
    return {**counts, "total": sum(counts.values())}


def _cell(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else scaled(value, 1000, ("", "k", "M", "G", "T"))
