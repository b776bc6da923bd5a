"""Trains a flow and a GPT-2 of the same size on one text, and tunes both on another, the flow at several depths.

    python -m experiments.adaptive_depth --wikitext2 FOLDER --shakespeare FILE     (up to two hours on two cores)
    python -m experiments.adaptive_depth --smoke                                   (minutes; texts that Python carries)
    python -m experiments.adaptive_depth --redraw                                  (table and figure, from the JSON)

Every training is a run below `run_dir`. Given again, the command continues where it stopped: finished runs are read, an
interrupted one is resumed. Results go to `output`: `results.json`, `table.md`, `figure.png`.
"""

import contextlib
import dataclasses
import io
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from experiments.adaptive_depth.plan import SMOKE, Job, Scale, jobs, settings
from experiments.adaptive_depth.report import draw, table
from experiments.adaptive_depth.texts import Text, prepare_texts
from qkvflow import finetune_lm, train_lm
from qkvflow.cli import decode, run_program
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.errors import UserError
from qkvflow.runs import RunDirectory, load_run
from qkvflow.runs.checkpoints import checkpoint_steps
from qkvflow.runs.config import FinetuneConfig, TrainConfig
from qkvflow.runs.evaluate import RunEvaluator
from qkvflow.tracking import read_metrics

OUTPUT = Path(__file__).parent / "results"


@dataclass
class AdaptiveDepthConfig:
    """
    wikitext2: folder with WikiText-2's valid.txt and test.txt.
    shakespeare: TinyShakespeare's file.
    run_dir: where the runs go.
    output: folder of the results; by default that of this module, or `<run_dir>/results` for a smoke test.
    smoke: a small version of everything.
    redraw: only the table and the figure, from `results.json`.
    """

    wikitext2: str | None = None
    shakespeare: str | None = None
    run_dir: str | None = None
    output: str | None = None
    smoke: bool = False
    redraw: bool = False


def main(config: AdaptiveDepthConfig) -> None:
    """Runs, or continues, the experiment.

    Errors: `UserError` if a text is missing, or if runs in `run_dir` were made with other settings.
    """
    scale = SMOKE if config.smoke else Scale()
    run_dir = Path(config.run_dir or ("runs/adaptive_depth_smoke" if config.smoke else "runs/adaptive_depth"))
    output = Path(config.output) if config.output else (run_dir / "results" if config.smoke else OUTPUT)
    if not config.redraw:
        _run(config, scale, run_dir, output)
    path = output / "results.json"
    if not path.is_file():
        raise UserError(f"there are no results in {output}: run the experiment first, without --redraw")
    record = json.loads(path.read_text())
    (output / "table.md").write_text(table(record))
    draw(record, output / "figure.png")
    print(table(record))
    print(f"Written to {output}", flush=True)


def _run(config: AdaptiveDepthConfig, scale: Scale, run_dir: Path, output: Path) -> None:
    texts = prepare_texts(config.wikitext2, config.shakespeare, run_dir / "texts", builtin=config.smoke)
    planned = list(jobs(texts, scale, run_dir))
    folders = {text.name: text for text in texts}
    results, began, worked = [], time.monotonic(), 0.0
    with quiet_libraries() as quiet:
        quiet.log_to(run_dir / "experiment.log")  # the programs' own progress, too
        for number, job in enumerate(planned, 1):
            start, is_new = time.monotonic(), not _is_finished(job)
            results.append(_result(job, folders[job.target], scale))
            seconds = time.monotonic() - start
            worked += _weight(job, scale) if is_new else 0.0
            rest = sum(_weight(other, scale) for other in planned[number:])
            left = f", about {rest * (start + seconds - began) / worked / 60:.0f} min left" if worked else ""
            last = results[-1]["report_loss"]
            print(f"{number}/{len(planned)}  {job.name}  loss {last:.3f}  {seconds:.0f} s{left}", file=quiet.terminal)
            jax.clear_caches()
    output.mkdir(parents=True, exist_ok=True)
    record = {
        "settings": settings(scale),
        "texts": {text.name: text.sizes() for text in texts},
        "jax": jax.__version__,
        "results": results,
    }
    (output / "results.json").write_text(json.dumps(record, indent=1) + "\n")


def _directory(job: Job) -> RunDirectory:
    return RunDirectory(Path(job.config["run_dir"]) / job.name)


def _is_finished(job: Job) -> bool:
    steps = checkpoint_steps(_directory(job).checkpoints)
    return bool(steps) and steps[-1] + 1 >= job.config["trainer"]["num_train_steps"]


def _weight(job: Job, scale: Scale) -> float:
    """What a training costs, roughly: evaluations of blocks, generated weights half as much again, and its start."""
    layers = job.depth or scale.layers
    flow = 1.5 if (job.system, job.kind) == ("flow", "pretrain") else 1.0
    return job.config["trainer"]["num_train_steps"] * layers * flow + 60 * scale.layers


def _result(job: Job, text: Text, scale: Scale) -> dict[str, Any]:
    """Trains what is not trained yet, and reads the numbers off the run; kept beside it in `report.json`."""
    directory = _directory(job)
    kept = directory.path / "report.json"
    if kept.is_file() and _is_finished(job):
        return json.loads(kept.read_text())
    if not _is_finished(job):
        with contextlib.redirect_stdout(io.StringIO()):
            if job.is_finetune:
                finetune_lm.main(decode(FinetuneConfig, job.config))
            else:
                train_lm.main(decode(TrainConfig, job.config))
    metrics = read_metrics(directory.metrics)
    curve = [[r["step"] + 1, r["eval/loss"]] for r in metrics if "eval/loss" in r]
    run = load_run(directory.path)
    parameters = sum(x.size for x in jax.tree.leaves(run.model) if hasattr(x, "size"))
    result = {
        "system": job.system,
        "kind": job.kind,
        "depth": job.depth,
        "source": job.source,
        "target": job.target,
        "seed": job.seed,
        "parameters": metrics[0].get("finetune/parameters", parameters),
        "trained_parameters": metrics[0].get("finetune/trained_parameters", parameters),
        "before": metrics[0].get("finetune/eval_loss_before"),
        "curve": curve,
        "report_loss": _report_loss(run, text, scale),
        "seconds_per_step": statistics.median(r["throughput/duration"] for r in metrics[1:]),
    }
    kept.write_text(json.dumps(result) + "\n")
    return result


def _report_loss(run: Any, text: Text, scale: Scale) -> float:
    """Loss on the part of the text that was not looked at before."""
    data = dataclasses.replace(run.config.data, validation=text.file("report"))
    unseen = dataclasses.replace(run, config=dataclasses.replace(run.config, data=data))
    return RunEvaluator(unseen, max_batches=scale.report_batches).loss(run.model)


if __name__ == "__main__":
    run_program(main, AdaptiveDepthConfig)
