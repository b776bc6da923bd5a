"""Trains a flow and a GPT-2 of the same size on one text, and tunes both on another, the flow at several depths.

    python -m experiments.adaptive_depth --wikitext2 FOLDER --shakespeare FILE     (up to two hours on two cores)
    python -m experiments.adaptive_depth --smoke                                   (minutes; texts that Python carries)
    python -m experiments.adaptive_depth --redraw                                  (table and figure, from the JSON)

Every training is a run below `run_dir`. Given again, the command continues where it stopped: finished runs are read, an
interrupted one is resumed. Results go to `output`: `results.json`, `table.md`, `figure.png`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from levanter.utils.jax_utils import parameter_count

from experiments import jobs, texts
from experiments.adaptive_depth.plan import SMOKE, Job, Scale, planned_jobs, settings
from experiments.adaptive_depth.report import draw, table
from experiments.measure import causal_at, read_training
from experiments.results import kept_in, show
from experiments.texts import Text
from qkvflow.cli import run_program
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.data.sources import BUILTIN_TEXTS
from qkvflow.errors import UserError
from qkvflow.runs import load_run
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

    Errors: `UserError` if a text is missing, runs in `run_dir` were made with other settings, or a model fails the test
    of causality.
    """
    scale = SMOKE if config.smoke else Scale()
    run_dir = Path(config.run_dir or ("runs/adaptive_depth_smoke" if config.smoke else "runs/adaptive_depth"))
    output = Path(config.output) if config.output else (run_dir / "results" if config.smoke else OUTPUT)
    record = kept_in(output, None if config.redraw else lambda: _run(config, scale, run_dir))
    draw(record, output / "figure.png")
    show(table(record), output, "table.md")


def _run(config: AdaptiveDepthConfig, scale: Scale, run_dir: Path) -> dict[str, Any]:
    both = _texts(config, run_dir / "texts")
    planned = list(planned_jobs(both, scale, run_dir))
    folders = {text.name: text for text in both}
    with quiet_libraries() as quiet:
        quiet.log_to(run_dir / "experiment.log")  # the programs' own progress, too
        results = jobs.carry_out(
            planned,
            lambda job: _result(job, folders[job.target], scale),
            weight=lambda job: _weight(job, scale),
            loss="report_loss",
            terminal=quiet.terminal,
        )
    return {
        "settings": settings(scale),
        "texts": {text.name: text.sizes() for text in both},
        "results": results,
        **jobs.origin("experiments.adaptive_depth"),
    }


def _texts(config: AdaptiveDepthConfig, folder: Path) -> list[Text]:
    if config.wikitext2 is None and config.shakespeare is None and config.smoke:
        return [texts.builtin(name, folder) for name in BUILTIN_TEXTS]
    if config.wikitext2 is None or config.shakespeare is None:
        raise UserError(
            "give both texts: --wikitext2 FOLDER (with valid.txt and test.txt) --shakespeare FILE; or --smoke alone,"
            " which takes texts that every Python carries"
        )
    return [texts.wikitext2(config.wikitext2, folder), texts.shakespeare(config.shakespeare, folder)]


def _weight(job: Job, scale: Scale) -> float:
    """What a training costs, roughly: evaluations of blocks, generated weights half as much again, and its start."""
    layers = job.depth or scale.layers
    flow = 1.5 if (job.system, job.kind) == ("flow", "pretrain") else 1.0
    return job.config["trainer"]["num_train_steps"] * layers * flow + 60 * scale.layers


def _result(job: Job, text: Text, scale: Scale) -> dict[str, Any]:
    """Trains what is not trained yet, and reads the numbers off the run; kept beside it in `report.json`."""
    directory = jobs.directory(job.config)
    asked = {"bytes": text.sizes(), "batches": scale.report_batches}
    jobs.train(job.config, job.is_finetune)
    return jobs.kept(directory.path / "report.json", asked, lambda: _read(job, text, scale))


def _read(job: Job, text: Text, scale: Scale) -> dict[str, Any]:
    directory = jobs.directory(job.config)
    metrics = read_metrics(directory.metrics)
    trained = read_training(job.config)
    run = load_run(directory.path)
    parameters = parameter_count(run.model)
    return {
        "system": job.system,
        "kind": job.kind,
        "depth": job.depth,
        "source": job.source,
        "target": job.target,
        "seed": job.seed,
        "parameters": metrics[0].get("finetune/parameters", parameters),
        "trained_parameters": metrics[0].get("finetune/trained_parameters", parameters),
        "before": metrics[0].get("finetune/eval_loss_before"),
        "causal_at": causal_at(run, job.name),
        "curve": trained["curve"],
        "report_loss": jobs.loss_on(run, text.file("report"), scale.report_batches),
        "seconds_per_step": trained["seconds_per_step"],
    }


if __name__ == "__main__":
    run_program(main, AdaptiveDepthConfig)
