"""What the report shows of a run, as plain data: curves, parameters, spectra, texts, readings at other depths. See
`report.html`."""

import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qkvflow.analysis import lyapunov, spectral, trajectory
from qkvflow.analysis.opening import EncodedText
from qkvflow.analysis.reading import Reading
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeConfig
from qkvflow.models.cost import evaluations, parameters_by_group
from qkvflow.models.levanter_twin import enter
from qkvflow.runs.load import Run
from qkvflow.tracking import read_metrics

_CURVE = 400  # points of a training curve
_POINTS = 24_000  # eigenvalues of one family; more are thinned out, the largest kept
_SHOWN = ("radius", "positive", "symmetric")

Data = dict[str, Any]
Step = Callable[[], None]
T = TypeVar("T")


def describe_run(run: Run, name: str) -> Data:
    """Name, kind, parameters, evaluations."""
    config = run.config.model
    kind = config.get_choice_name(type(config)) or type(config).__name__
    rows = {"model": kind, "checkpoint": f"step {run.step}"}
    if isinstance(config, NeuralOdeConfig):
        choice = {
            part: getattr(config, part).get_choice_name(type(getattr(config, part))) for part in ("weights", "block")
        }
        depth = config.depth
        steps = "adaptive" if depth.is_adaptive else depth.reading_steps
        rows |= {**choice, "form": getattr(config.block, "form", "-"), "depth": f"{depth.solver}, {steps} steps"}
    rows |= {"width": config.Embed.size, "context": config.max_seq_len, "vocabulary": run.model.Vocab.size}
    ours = enter(run.model)
    rows["evaluations of the block per token"] = evaluations(ours.config)
    groups = {group: count for group, count in parameters_by_group(ours).items() if count}
    return {"name": name, "facts": rows, "parameters": groups}


def curves(run: Run) -> Data:
    """Training loss, averaged to a few hundred points, and validation loss."""
    path = run.directory.metrics
    records = read_metrics(path) if path.is_file() else []
    pairs = {
        key: [(r["step"], r[f"{key}/loss"]) for r in records if f"{key}/loss" in r and _finite(r[f"{key}/loss"])]
        for key in ("train", "eval")
    }
    return {"train": _thinned(pairs["train"]), "eval": [list(pair) for pair in pairs["eval"]]}


def spectra(run: Run, draws: int, step: Step) -> Data:
    """Eigenvalues and summaries of each family at the training times, with the band of fresh models."""
    times = spectral.training_times(run.model)
    data: Data = {"times": _round(times, 4), "families": {}}
    for family in spectral.families(run.model):
        values = spectral.eigenvalues(run.model, family)
        values = values[:, None] if family == "ff" else values
        keep = max(1, min(values.shape[-1], _POINTS // (values.shape[0] * values.shape[1])))
        shown = values[..., :keep]
        own = spectral.summary(run.model, family)
        entry: Data = {"re": _round(shown.real), "im": _round(shown.imag), "left_out": values.shape[-1] - keep}
        entry |= {name: _round(getattr(own, name).reshape(len(times), -1)) for name in _SHOWN}
        if draws:
            fresh = spectral.random_summaries(run.model, family, draws=draws)
            flat = {name: np.moveaxis(getattr(fresh, name), 0, -1).reshape(len(times), -1) for name in _SHOWN}
            entry["band"] = {name: [_round(v.min(1)), _round(v.max(1))] for name, v in flat.items()}
        data["families"][family] = entry
        step()
    return data


def text_data(reading: Reading, text: EncodedText, decode: Callable[[int], str], k: int, step: Step) -> Data:
    """Everything that belongs to one text: token scores, logit lens, motion, entropy, exponents of the sequence."""
    ids = text.ids
    logs = lyapunov.token_exponents(reading, ids)
    scores = np.cumsum(logs, axis=0).max(axis=-1)
    step()
    lens = trajectory.logit_lens(reading, ids, top=min(5, reading.model.Vocab.size))
    motion = trajectory.motion(reading, ids)
    step()
    data: Data = {
        "text": text.text,
        "labels": list(text.labels),
        "ends": _round(reading.ends, 4),
        "times": _round(reading.times, 4),
        "scores": _round(scores),
        "lens": {
            "loss": _round(lens.loss),
            "top": [[[decode(int(i)) for i in token] for token in row] for row in lens.top_tokens],
            "p": _round(lens.top_probabilities, 3),
        },
        "motion": {f.name: _round(getattr(motion, f.name)) for f in fields(motion)},
    }
    try:
        data["entropy"] = _round(trajectory.attention_entropy(reading, ids))
    except UserError as error:
        data["missing"] = {"entropy": str(error)}
    step()
    k = min(k, len(ids) * reading.model.Embed.size)
    data["exponents"] = _round(np.cumsum(lyapunov.step_exponents(reading, ids, k), axis=0))
    step()
    return data


def depth_sweep(run: Run) -> list[Data]:
    """What `eval_lm` found at other depths, or nothing if it was not asked."""
    return _evaluation(run, "depth.json", lambda found: [_plain(r) for r in found["readings"]], [])


def continuity(run: Run) -> Data | None:
    """What `eval_lm --continuity` found: readings and verdict, or nothing if it was not asked."""
    return _evaluation(
        run,
        "continuity.json",
        lambda found: {"verdict": str(found["verdict"]), "readings": [_plain(r) for r in found["readings"]]},
        None,
    )


def _evaluation(run: Run, name: str, read: Callable[[Data], T], missing: T) -> T:
    path = run.path / "evaluation" / name
    if not path.is_file():
        return missing
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error}): delete it, or run eval_lm again") from None


def _plain(reading: Data) -> Data:
    return {k: v if not isinstance(v, float) or _finite(v) else None for k, v in reading.items()}


def render(data: Data) -> str:
    """The page: the template with the data in it, a single file that needs nothing else."""
    template = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    # Inside <script>, "</" could end it.
    return template.replace("@DATA@", json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))


def _thinned(pairs: list[tuple[int, float]]) -> list[list[float]]:
    """Means over neighbouring points, so that at most a few hundred are left."""
    size = max(1, -(-len(pairs) // _CURVE))
    groups = [np.asarray(pairs[i : i + size], np.float64) for i in range(0, len(pairs), size)]
    return [[round(float(g[:, 0].mean()), 1), round(float(g[:, 1].mean()), 4)] for g in groups]


def _round(array, digits: int | None = None) -> Any:
    """Nested lists of numbers with few digits; None for what is not finite. Four significant digits by default."""
    flat = np.asarray(array, np.float64)
    text = (lambda x: round(x, digits)) if digits is not None else (lambda x: float(f"{x:.4g}"))
    if flat.ndim == 0:
        return text(float(flat)) if _finite(float(flat)) else None
    if flat.ndim == 1:
        return [text(x) if _finite(x) else None for x in flat.tolist()]
    return [_round(row, digits) for row in flat]


def _finite(x) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)
