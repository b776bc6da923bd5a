"""Compares language models honestly: the same text in the same order; at equal steps, FLOPs or parameters.

    python -m experiments.compare --config experiments/compare/wikitext2.yaml [--text.folder DIR]
    python -m experiments.compare --smoke                (minutes; a text that Python carries)
    python -m experiments.compare --config FILE --redraw (tables and figures, from the JSON)

Every training is a run below `run_dir`. Given again, the command continues where it stopped. Results go to `output`:
`results.json`, `results.md`, `table.tex`, `summary.csv`, `runs.csv` and figures.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import jobs
from experiments.compare import figures, tables
from experiments.compare.config import CompareConfig
from experiments.compare.cost import step_memory
from experiments.compare.measure import measure
from experiments.compare.plan import Job, Variant, choose_rates, reported_jobs, selection_jobs, variants
from experiments.texts import Text
from qkvflow.cli import run_program
from qkvflow.cli.quiet import Quiet, quiet_libraries
from qkvflow.errors import UserError

SMOKE = Path(__file__).parent / "smoke.yaml"


def main(config: CompareConfig) -> None:
    """Runs, or continues, the comparison.

    Errors: `UserError` if the configuration cannot be, a text is missing, runs in `run_dir` were made with other
    settings, or a model fails the test of causality.
    """
    if config.config_path is None and not config.systems:
        raise UserError(
            "nothing to compare: give --config experiments/compare/wikitext2.yaml (its text by --text.folder DIR), or"
            " --smoke"
        )
    name = "" if config.config_path is None else f"_{Path(config.config_path).stem}"
    run_dir = Path(config.run_dir or f"runs/compare{name}")
    output = Path(config.output) if config.output else run_dir / "results"
    if not config.redraw:
        config.check()
        run_dir.mkdir(parents=True, exist_ok=True)
        record = _run(config, run_dir)
        output.mkdir(parents=True, exist_ok=True)
        (output / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    path = output / "results.json"
    if not path.is_file():
        raise UserError(f"there are no results in {output}: run the comparison first, without --redraw")
    record = json.loads(path.read_text())
    (output / "results.md").write_text(tables.markdown(record))
    (output / "table.tex").write_text(tables.latex(record))
    tables.write_csv(record, output / "summary.csv", output / "runs.csv")
    figures.draw(record, output)
    print(tables.markdown(record))
    print(f"Written to {output}", flush=True)


def arguments(argv: Sequence[str]) -> list[str]:
    """The command line as it is parsed: `--smoke` stands for `--config` with the file of that name."""
    smoke = ["--config", str(SMOKE)] if "--smoke" in argv else []
    return [*smoke, *(word for word in argv if word != "--smoke")]


def _run(config: CompareConfig, run_dir: Path) -> dict[str, Any]:
    text = config.text.prepare(run_dir / "texts")
    planned = variants(config, text, run_dir)
    with quiet_libraries() as quiet:
        quiet.log_to(run_dir / "experiment.log")
        jobs.use_compilation_cache(run_dir / "compiled")
        costs = {v.label: _costs(v, run_dir, quiet) for v in planned}
        search = selection_jobs(config, planned)
        if search:
            print(f"{len(search)} trainings to choose learning rates by", file=quiet.terminal)
        searched = _carry_out(search, text, config, "select_loss", quiet)
        reported = reported_jobs(config, planned, choose_rates(search, [r["select_loss"] for r in searched]))
        flops = sum(one.variant.cost.flops * one.variant.steps for one in reported)
        print(f"{len(reported)} trainings to report, {flops:.3g} FLOPs", file=quiet.terminal)
        results = _carry_out(reported, text, config, "report_loss", quiet)
    return {
        "protocol": _protocol(config, text, planned[0]),
        "costs": costs,
        "results": results,
        "selection": searched,
        **jobs.origin("experiments.compare"),
    }


def _carry_out(planned: list[Job], text: Text, config: CompareConfig, loss: str, quiet: Quiet) -> list[dict[str, Any]]:
    return jobs.carry_out(
        planned,
        lambda job: measure(job, text, config),
        weight=lambda job: job.variant.cost.flops * job.variant.steps,
        loss=loss,
        terminal=quiet.terminal,
    )


def _costs(variant: Variant, run_dir: Path, quiet: Quiet) -> dict[str, Any]:
    """Costs and memory; the latter is found by compiling, and kept."""
    asked = {"model": variant.raw["model"], "jax": jax.__version__, "tokens": variant.cost.tokens}
    path = run_dir / "costs" / f"{variant.system}-d{variant.width}.json"
    found = jobs.kept(path, asked, lambda: {"memory": step_memory(variant.raw)})
    costs = dataclasses.asdict(variant.cost) | found
    print(
        f"{variant.label}: {costs['parameters']:,} parameters, {costs['materialised']:,} materialised,"
        f" {costs['flops'] * variant.steps:.3g} FLOPs",
        file=quiet.terminal,
    )
    return costs


def _protocol(config: CompareConfig, text: Text, reference: Variant) -> dict[str, Any]:
    systems = [config.reference, *(name for name in config.systems if name != config.reference)]
    return {
        "text": text.name,
        "parts": config.text.parts,
        "bytes": text.sizes(),
        "tokenizer": reference.raw["data"]["tokenizer"],
        "systems": {name: config.systems[name] for name in systems},
        "reference": config.reference,
        "rows": config.rows,
        "seeds": config.seeds,
        "learning_rates": config.learning_rates,
        "selection_seeds": config.selection_seeds,
        "steps": reference.steps,
        "tokens_per_step": reference.cost.tokens,
        "select_batches": config.select_batches,
        "report_batches": config.report_batches,
        "targets": config.targets,
    }


if __name__ == "__main__":
    run_program(main, CompareConfig, arguments(sys.argv[1:]))
