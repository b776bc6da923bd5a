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

from experiments import jobs
from experiments.gradient_flow import figures, tables
from experiments.gradient_flow.config import GradientFlowConfig
from experiments.gradient_flow.measure import measure, unigram
from experiments.gradient_flow.plan import Job, planned_jobs
from experiments.texts import Text
from qkvflow.cli import decode, run_program
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.errors import UserError
from qkvflow.runs.config import TrainConfig

DEFAULT, SMOKE = (Path(__file__).parent / f"{name}.yaml" for name in ("wikitext2", "smoke"))


def main(config: GradientFlowConfig) -> None:
    """Runs, or continues, the experiment.

    Errors: `UserError` if the configuration cannot be, a text is missing, runs in `run_dir` were made with other
    settings, or a model fails the test of causality.
    """
    name = "" if config.config_path is None else f"_{Path(config.config_path).stem}"
    run_dir = Path(config.run_dir or f"runs/gradient_flow{name}")
    output = Path(config.output) if config.output else run_dir / "results"
    if not config.redraw:
        config.check()
        record = _run(config, run_dir)
        output.mkdir(parents=True, exist_ok=True)
        (output / "results.json").write_text(_compact(record))
    path = output / "results.json"
    if not path.is_file():
        raise UserError(f"there are no results in {output}: run the experiment first, without --redraw")
    record = json.loads(path.read_text())
    (output / "results.md").write_text(tables.markdown(record))
    figures.draw(record, output)
    print(tables.markdown(record))
    print(f"Written to {output}", flush=True)


def arguments(argv: Sequence[str]) -> list[str]:
    """The command line as it is parsed: `--smoke` stands for `--config` with the file of that name, and the full
    experiment's file is the default."""
    if "--smoke" in argv:
        chosen = ["--config", str(SMOKE)]
    elif any(word.split("=")[0] in ("--config", "--config_path", "--help", "-h") for word in argv):
        chosen = []
    else:
        chosen = ["--config", str(DEFAULT)]
    return [*chosen, *(word for word in argv if word != "--smoke")]


def _run(config: GradientFlowConfig, run_dir: Path) -> dict[str, Any]:
    text = config.text.prepare(run_dir / "texts")
    planned = planned_jobs(config, text, run_dir)
    with quiet_libraries() as quiet:
        quiet.log_to(run_dir / "experiment.log")
        jobs.use_compilation_cache(run_dir / "compiled")
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
    length = hybrid.train_seq_len or hybrid.model.max_seq_len
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
        "tokens_per_step": length * hybrid.trainer.batch_schedule.batch_size_at_step(0),
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
