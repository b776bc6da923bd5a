"""Converts a trained model to a flow: aligns its layers, fits W(t) to them, and writes a run.

    qkvflow lift --base path/to/gpt2 --weights '{type: basis, basis: cosine, dim: 6}' --run runs/lifted

`lift.json` in the run has the results. `qkvflow finetune` heals the flow; see docs/hub.md.
"""

import dataclasses
import math
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import jmp

import qkvflow as qkvflow  # registers the models
from qkvflow.cli import run_program
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.config import Keys, encode
from qkvflow.data import copy_tokenizer
from qkvflow.errors import Notice, UserError
from qkvflow.files import json_text, write_text
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.alignment import Roughness, layer_roughness
from qkvflow.models.levanter_twin import enter, enter_config
from qkvflow.models.lifting import aligned, check_liftable, lift
from qkvflow.places import Place
from qkvflow.progress import Progress
from qkvflow.ranges import Count
from qkvflow.runs import Run, load_run
from qkvflow.runs.config import RunTrainerConfig, TrainConfig
from qkvflow.runs.directory import location_of
from qkvflow.runs.evaluate import RunEvaluator, on_other_text
from qkvflow.runs.load import find_run, stored_config
from qkvflow.runs.made import new_run, refuse_target
from qkvflow.weights import BasisConfig, Fit, PerLayer, WeightsConfig, read_error

_ROUNDING = 1e-5  # a relative error that fp32 does not explain
_SHORT_ROUNDING = 0.02  # ... and that rounding to bf16 does not explain: of ordinary layers it is about 0.002


@dataclass
class LiftConfig:
    """
    Attributes:
        base: a Hugging Face folder or a run: GPT-2, Llama, or ordinary layers (weights: per_layer).
        weights: the form of W(t), `{type: basis, basis, dim}`: K = `dim` functions of time, at most as many as layers.
        run: the new run directory.
        checkpoint_step: N of the base's checkpoint step-N; the newest by default.
        align: first permute hidden units and heads so that neighbouring layers are close, which does not change their
            function; false keeps the original order.
        loss_by_k: values of `dim`, `[1, 2, 6]`, for which to report the loss before healing, with and without
            alignment.
        data: keys that replace those of the base's `data`, for the losses and the new run: `--data.validation FILE`.
        batch_size: sequences at a time for `loss_by_k`; as in training by default.
        max_eval_batches: number of batches of each validation set; all by default.
    """

    base: str
    weights: WeightsConfig
    run: str
    checkpoint_step: int | None = None
    align: bool = True
    loss_by_k: list[Count] | None = None
    data: Keys | None = None
    batch_size: Count | None = None
    max_eval_batches: Count | None = None


def main(config: LiftConfig) -> Path | Place:
    """Lifts, prints what was found and writes the run; returns where."""
    for name in ("batch_size", "max_eval_batches"):
        if getattr(config, name) is not None and not config.loss_by_k:
            raise UserError(f"--{name} is only for the losses of --loss_by_k: add that, or leave it out")
    target = location_of(config.run)
    refuse_target(target, "--run")
    with quiet_libraries() as quiet:
        progress = Progress(quiet.terminal)
        with progress.phase(f"Loading {config.base}"):
            shape = enter_config(stored_config(find_run(config.base)).model)
            weights = check_liftable(shape, config.weights, align=config.align)
            for dim in config.loss_by_k or ():
                check_liftable(shape, dataclasses.replace(weights, dim=dim), align=config.align)
            run = on_other_text(load_run(config.base, config.checkpoint_step), config.data or {})
            if {"train", "validation", "components"} & set(config.data or {}):
                run.config.data.check_files()
            model = enter(run.model)
        evaluator = _evaluator(run, config) if config.loss_by_k else None
        ordered = _aligned(model, progress) if config.align else model
        with progress.phase("Fitting W(t)"):
            flow, found = lift(ordered, weights)
        report = _report(model, ordered, found, run.step, config)
        computed = _computed(flow, ordered, run.config.trainer.mp)
        if computed is not None:
            report["error"]["computed"] = computed
        if evaluator is not None:
            report["loss"] = _losses(model, ordered, weights, evaluator, config, progress)
        with progress.phase(f"Writing {target}"), new_run(target, _run_config(run, flow), flow) as fresh:
            copy_tokenizer(run.directory.tokenizer, fresh.tokenizer, run.config.data.tokenizer)
            write_text(fresh.path / "lift.json", json_text(report))
    print(_text(report))
    if weights.dim == report["layers"] and found.error > _ROUNDING:
        warnings.warn(Notice(_ill_conditioned(weights, found)), stacklevel=1)
    if computed is not None and math.sqrt(max(computed**2 - found.error**2, 0.0)) > _SHORT_ROUNDING:
        warnings.warn(Notice(_lost_in_16_bits(weights, found, computed)), stacklevel=1)
    print(f"The run is in {target}; use it in any program with --run {target}", flush=True)
    return target


def _evaluator(run: Run, config: LiftConfig) -> RunEvaluator:
    return RunEvaluator(run, config.batch_size, config.max_eval_batches)


def _aligned(model: NeuralOdeLMHeadModel, progress: Progress) -> NeuralOdeLMHeadModel:
    with progress.phase("Aligning the layers"):
        return aligned(model)


def _computed(flow: NeuralOdeLMHeadModel, ordered: NeuralOdeLMHeadModel, mp: jmp.Policy) -> float | None:
    """The error of the fit as a training reads W(t), if it computes in 16 bits; None if not."""
    if jnp.dtype(mp.compute_dtype).itemsize > 2:
        return None
    layers = ordered.transformer.flow.weights
    assert isinstance(layers, PerLayer)
    return read_error(mp.cast_to_compute(flow.transformer.flow.weights), layers)


def _run_config(run: Run, flow: NeuralOdeLMHeadModel) -> TrainConfig:
    """What the run says of itself: finished after its only step, on the text and in the precision of the base."""
    given = run.config.trainer
    trainer = RunTrainerConfig(num_train_steps=1, train_batch_size=given.train_batch_size, mp=given.mp)
    length = min(run.config.Pos.size, flow.config.max_seq_len)
    return TrainConfig(flow.config, run.config.data, trainer, train_seq_len=length, vocab_size=flow.Vocab.size)


def _report(
    model: NeuralOdeLMHeadModel, ordered: NeuralOdeLMHeadModel, found: Fit, step: int, config: LiftConfig
) -> dict[str, Any]:
    before, after = (layer_roughness(m.transformer.flow.weights) for m in (model, ordered))
    return {
        "base": config.base,
        "checkpoint_step": step,
        "layers": len(model.transformer.flow.weights.times),
        "weights": encode(config.weights),
        "align": config.align,
        "roughness": {"before": asdict(before), "after": asdict(after)},
        "error": {"all": found.error, "by_array": found.errors},
        "condition": found.condition,
    }


def _losses(
    model: NeuralOdeLMHeadModel,
    ordered: NeuralOdeLMHeadModel,
    weights: BasisConfig,
    evaluator: RunEvaluator,
    config: LiftConfig,
    progress: Progress,
) -> dict[str, Any]:
    """Nats per token: of the base, and of flows by K, none of them healed."""
    with progress.phase("Loss of the base"):
        base = evaluator.loss(model)
    ways = {"not_aligned": model} | ({"aligned": ordered} if config.align else {})
    by_k = []
    for dim in sorted(set(config.loss_by_k or ())):
        found: dict[str, float] = {"k": dim}
        for name, layers in ways.items():
            with progress.phase(f"Loss with K = {dim}, {name.replace('_', ' ')}"):
                found[name] = evaluator.loss(lift(layers, dataclasses.replace(weights, dim=dim))[0])
        by_k.append(found)
    return {"base": base, "by_k": by_k}


def _text(report: dict[str, Any]) -> str:
    """What was found, for people."""
    before, after = (Roughness(**report["roughness"][when]) for when in ("before", "after"))
    errors, weights = report["error"]["by_array"], report["weights"]
    what = "roughness before and after alignment" if report["align"] else "roughness"
    lines = [f"{weights['basis']}, K = {weights['dim']}, of {report['layers']} layers"]
    lines += [f"{'':<32}{what:>38}{'error of the fit':>20}"]
    rows = {name: (before.by_array[name], after.by_array[name], error) for name, error in errors.items()}
    rows["all"] = (before.all, after.all, report["error"]["all"])
    for name, (first, second, error) in rows.items():
        rough = f"{first:.4f}  {second:.4f}" if report["align"] else f"{first:.4f}"
        lines.append(f"{name:<32}{rough:>38}{error:>20.2e}")
    if "loss" in report:
        ways = [name for name in ("not_aligned", "aligned") if name in report["loss"]["by_k"][0]]
        lines += ["", f"loss of the base {report['loss']['base']:.4f}; of flows without healing:"]
        lines += [f"{'K':>4}" + "".join(f"{name.replace('_', ' '):>14}" for name in ways)]
        lines += [f"{row['k']:>4}" + "".join(f"{row[n]:>14.4f}" for n in ways) for row in report["loss"]["by_k"]]
    return "\n".join(lines)


def _lost_in_16_bits(weights: BasisConfig, found: Fit, computed: float) -> str:
    return (
        f"the run computes in 16 bits, as its base (trainer.mp), where W(t) differs from the layers by {computed:.2g},"
        f" instead of {found.error:.1e} in fp32: coefficients of {weights.basis} are large and cancel (condition number"
        f" {found.condition:.1e}). Use cosine or piecewise, fewer functions, or --trainer.mp f32 to fine-tune it"
    )


def _ill_conditioned(weights: BasisConfig, found: Fit) -> str:
    return (
        f"{weights.basis} with as many functions as layers should pass through the layers, but the error is"
        f" {found.error:.1e}: the condition number of its matrix is {found.condition:.1e}, and fp32 has 7 digits. Use"
        " cosine or piecewise, or fewer functions"
    )


if __name__ == "__main__":
    run_program(main, LiftConfig)
