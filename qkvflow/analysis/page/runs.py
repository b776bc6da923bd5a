"""What the page shows about a whole run: its description, its curves, the results of `qkvflow eval`."""

import json
import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from qkvflow.analysis.page.numbers import Data, finite, rounded
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeConfig
from qkvflow.models.cost import evaluations, parameters_by_group
from qkvflow.models.levanter_twin import enter
from qkvflow.runs.load import Run
from qkvflow.tracking import read_metrics

_CURVE = 400  # points of a training curve
T = TypeVar("T")


def describe_run(run: Run, name: str) -> Data:
    """Name, kind, parameters, evaluations, data and date; `facts` are for the collapsible table."""
    config = run.config.model
    kind = config.get_choice_name(type(config)) or type(config).__name__
    rows = {"model": kind}
    if isinstance(config, NeuralOdeConfig):
        choice = {
            part: getattr(config, part).get_choice_name(type(getattr(config, part))) for part in ("weights", "block")
        }
        depth = getattr(run.model.config, "depth", config.depth)  # of this checkpoint, if the depth grows
        steps = "adaptive" if depth.is_adaptive else depth.reading_steps
        rows |= {**choice, "form": getattr(config.block, "form", "-"), "depth": f"{depth.solver}, {steps} steps"}
        if config.prelude_layers or config.coda_layers:
            rows["layers around"] = f"{config.prelude_layers} and {config.coda_layers}, {config.ordinary_form}"
    rows |= {"width": config.Embed.size, "context": config.max_seq_len, "vocabulary": run.model.Vocab.size}
    ours = enter(run.model)
    rows["evaluations of the block per token"] = evaluations(ours.config)
    data = run.config.data
    rows |= {"data": _data_name(run), "tokenizer": data.tokenizer}
    rows |= {"checkpoint": f"step {run.step}", "written": _date(run)}
    groups = {group: count for group, count in parameters_by_group(ours).items() if count}
    tied, around = ours.config.block.tie_word_embeddings, (ours.config.prelude_layers, ours.config.coda_layers)
    about = {"name": name, "facts": rows, "parameters": groups, "tied": tied, "around": around}
    return about | {"uniform": math.log(run.model.Vocab.size)}


def curves(run: Run) -> Data:
    """Training loss, averaged to a few hundred points, and validation loss."""
    path = run.directory.metrics
    records = read_metrics(path) if path.is_file() else []
    pairs = {
        key: [(r["step"], r[f"{key}/loss"]) for r in records if f"{key}/loss" in r and finite(r[f"{key}/loss"])]
        for key in ("train", "eval")
    }
    return {"train": _thinned(pairs["train"]), "eval": rounded(pairs["eval"], 5) if pairs["eval"] else []}


def depth_sweep(run: Run) -> list[Data]:
    """The losses at other depths from `qkvflow eval`; empty if not computed."""
    return _evaluation(run, "depth.json", lambda found: [_plain(r) for r in found["readings"]], [])


def continuity(run: Run) -> Data | None:
    """Measurements and verdict from `qkvflow eval --continuity`; None if not computed."""
    return _evaluation(
        run,
        "continuity.json",
        lambda found: {"verdict": str(found["verdict"]), "readings": [_plain(r) for r in found["readings"]]},
        None,
    )


def exits(run: Run) -> list[Data]:
    """Loss against mean evaluations from `qkvflow eval --exit`; empty if not computed."""

    def read(found: Data) -> list[Data]:
        return [
            {k: r[k] for k in ("rule", "threshold", "loss", "evaluations", "of")} for r in map(_plain, found["exits"])
        ]

    return _evaluation(run, "exits.json", read, [])


def anytime(run: Run) -> list[Data]:
    """Loss, evaluations and speed of fewer steps, exits and drafts from `experiments.bench.anytime`, full depth first;
    empty if not run."""
    keys = ("kind", "name", "loss", "evaluations", "tokens_per_second", "speed")
    return _evaluation(
        run, "anytime.json", lambda found: [{k: r[k] for k in keys} for r in map(_plain, found["readings"])], []
    )


def _evaluation(run: Run, name: str, read: Callable[[Data], T], missing: T) -> T:
    path = run.path / "evaluation" / name
    if not path.is_file():
        return missing
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        is_of_another = found.get("checkpoint_step", run.step) != run.step
        return missing if is_of_another else read(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error}): delete it, or run qkvflow eval again") from None


def _plain(reading: Data) -> Data:
    return {k: v if not isinstance(v, float) or finite(v) else None for k, v in reading.items()}


def _data_name(run: Run) -> str:
    """The training data in a few words: files, or the sources of its components."""
    data = run.config.data
    if data.train:
        return ", ".join([data.train] if isinstance(data.train, str) else data.train)
    names = []
    for name, component in data.components.items():
        source = getattr(component, "source", None)
        where = [getattr(source, key, None) for key in ("text", "id", "name")]
        names.append(": ".join([name, *(str(w) for w in where if w)][:3]))
    return ", ".join(names) or "built-in text"


def _date(run: Run) -> str:
    """When the checkpoint was written; empty if its record does not say."""
    if run.directory.hub is not None:
        return "–"
    try:
        found = json.loads((run.directory.checkpoints / f"step-{run.step}").read("metadata.json"))
        return str(found["timestamp"])[:16].replace("T", " ")
    except (OSError, ValueError, KeyError, TypeError):
        return "–"


def _thinned(pairs: list[tuple[int, float]]) -> list[list[float]]:
    """Means over adjacent points, leaving at most a few hundred."""
    size = max(1, -(-len(pairs) // _CURVE))
    groups = [np.asarray(pairs[i : i + size], np.float64) for i in range(0, len(pairs), size)]
    return [[round(float(g[:, 0].mean()), 1), round(float(g[:, 1].mean()), 4)] for g in groups]
