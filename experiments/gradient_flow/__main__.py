"""Trains the ODE flow hybrid beside ordinary layers, and looks at gradients before clipping, solvers and control.

    python -m experiments.gradient_flow --config experiments/gradient_flow/wikitext2.yaml [--text.folder DIR]
    python -m experiments.gradient_flow --smoke                (minutes; a text that Python carries, bytes)
    python -m experiments.gradient_flow --config FILE --redraw (table and figures, from the JSON)

Every training is a run below `run_dir`. Given again, the command continues where it stopped. Results go to `output`:
`results.json`, `results.md`, and the figures `gradient_flow` and `invariance`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import jobs, study
from experiments.gradient_flow import figures, tables
from experiments.gradient_flow.config import GradientFlowConfig
from experiments.gradient_flow.measure import measure, unigram
from experiments.gradient_flow.plan import Job, planned_jobs
from experiments.results import kept_in, show
from experiments.texts import Text
from qkvflow.cli import run_program
from qkvflow.config import decode
from qkvflow.runs.config import TrainConfig

DEFAULT, SMOKE = (Path(__file__).parent / f"{name}.yaml" for name in ("wikitext2", "smoke"))


def main(config: GradientFlowConfig) -> None:
    """Runs, or continues, the experiment.

    Errors: `UserError` if the configuration cannot be, a text is missing, runs in `run_dir` were made with other
    settings, or a model fails the test of causality.
    """
    run_dir = config.runs("gradient_flow")
    output = config.results(run_dir)
    record = kept_in(output, None if config.redraw else lambda: _run(config, run_dir), _compact)
    figures.draw(record, output)
    show(tables.markdown(record), output)


def arguments(argv: Sequence[str]) -> list[str]:
    """The command line as it is parsed: the full experiment's file is the default."""
    return study.arguments(argv, SMOKE, DEFAULT)


def _run(config: GradientFlowConfig, run_dir: Path) -> dict[str, Any]:
    config.check()
    text = config.text.prepare(run_dir / "texts")
    planned = planned_jobs(config, text, run_dir)
    with jobs.at_work(run_dir) as quiet:
        results = jobs.carry_out(
            planned,
            lambda job: measure(job, text, config),
            weight=lambda job: job.evaluations,
            loss="report_loss",
            terminal=quiet.terminal,
        )
        return {
            "protocol": _protocol(config, text, planned),
            "unigram": unigram(planned[0], text),
            "results": results,
            **jobs.origin("experiments.gradient_flow"),
        }


def _protocol(config: GradientFlowConfig, text: Text, planned: list[Job]) -> dict[str, Any]:
    hybrid = decode(TrainConfig, next(job for job in planned if job.system == "hybrid").config)
    adam = hybrid.optimizer
    return {
        "text": text.name,
        "parts": config.text.parts,
        "bytes": text.sizes(),
        "tokenizer": hybrid.data.tokenizer,
        "systems": config.systems,
        "replaced_layers": config.replaced_layers,
        "flow_steps": hybrid.model.depth.steps,
        "alpha": hybrid.model.control.alpha,
        "seeds": config.seeds,
        "num_train_steps": hybrid.trainer.num_train_steps,
        "tokens_per_step": hybrid.Pos.size * hybrid.trainer.batch_schedule.batch_size_at_step(0),
        "optimizer": f"AdamW, learning rate {adam.learning_rate:g} ({adam.lr_schedule}), weight decay"
        f" {adam.weight_decay:g}, clipped at {adam.max_grad_norm}",
        "weight_decay_on": hybrid.weight_decay_on,
        "final_steps": config.final_steps,
        "report_batches": config.report_batches,
        "refinements": config.refinements,
    }


def _compact(record: dict[str, Any]) -> str:
    """JSON with a line for each training: the norms of every step are in it."""
    results = ",\n".join(json.dumps(r) for r in record["results"])
    rest = json.dumps({key: value for key, value in record.items() if key != "results"}, indent=1)
    return f'{rest[:-2]},\n "results": [\n{results}\n]\n}}\n'


if __name__ == "__main__":
    run_program(main, GradientFlowConfig, arguments(sys.argv[1:]))
