"""Compares language models honestly: the same text in the same order; at equal steps, FLOPs or parameters.

    python -m experiments.compare --config experiments/compare/wikitext2.yaml [--text.folder DIR]
    python -m experiments.compare --smoke                (minutes; a text that Python carries)
    python -m experiments.compare --config FILE --redraw (tables and figures, from the JSON)

Every training is a run below `run_dir`. Given again, the command continues where it stopped. Results go to `output`:
`results.json`, `results.md`, `table.tex`, `summary.csv`, `runs.csv` and figures.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax

from experiments import jobs, rates, study
from experiments.compare import figures, tables
from experiments.compare.config import CompareConfig
from experiments.compare.plan import Variant, variants
from experiments.cost import step_memory
from experiments.measure import measure
from experiments.rates import Job
from experiments.results import kept_in, show
from experiments.texts import Text
from qkvflow.cli import run_program
from qkvflow.cli.quiet import Quiet
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
    run_dir = config.runs("compare")
    output = config.results(run_dir)
    record = kept_in(output, None if config.redraw else lambda: _run(config, run_dir))
    (output / "table.tex").write_text(tables.latex(record))
    tables.write_csv(record, output / "summary.csv", output / "runs.csv")
    figures.draw(record, output)
    show(tables.markdown(record), output)


def _run(config: CompareConfig, run_dir: Path) -> dict[str, Any]:
    config.check()
    text = config.text.prepare(run_dir / "texts")
    planned = variants(config, text, run_dir)
    with jobs.at_work(run_dir) as quiet:
        costs = {v.label: _costs(v, run_dir, quiet) for v in planned}
        found = rates.carry_out(config, planned, lambda job: _measure(job, text, config), quiet)
    return {
        "protocol": _protocol(config, text, planned[0]),
        "costs": costs,
        **found,
        **jobs.origin("experiments.compare"),
    }


def _measure(job: Job[Variant], text: Text, config: CompareConfig) -> dict[str, Any]:
    """What the training was, and what is read off it."""
    variant = job.variant
    what = {"system": variant.system, "rows": list(variant.rows), "width": variant.width, "steps": variant.steps}
    return {**what, **measure(job, text, config.report_batches, "compare.json")}


def _costs(variant: Variant, run_dir: Path, quiet: Quiet) -> dict[str, Any]:
    """Costs and memory; the latter is found by compiling, and kept."""
    asked = {"model": variant.raw["model"], "jax": jax.__version__, "tokens": variant.cost.tokens}
    path = run_dir / "costs" / f"{variant.system}-d{variant.width}.json"
    found = jobs.kept(path, asked, lambda: {"memory": step_memory(variant.raw)})
    costs = dataclasses.asdict(variant.cost) | found
    print(
        f"{variant.label}: {costs['parameters']:,} parameters, {costs['materialised']:,} materialised,"
        f" {variant.flops:.3g} FLOPs",
        file=quiet.terminal,
    )
    return costs


def _protocol(config: CompareConfig, text: Text, reference: Variant) -> dict[str, Any]:
    systems = [config.reference, *(name for name in config.systems if name != config.reference)]
    return {
        **study.protocol(config, text, reference.raw["data"]["tokenizer"], reference.cost.tokens),
        "systems": {name: config.systems[name] for name in systems},
        "reference": config.reference,
        "rows": config.rows,
        "steps": reference.steps,
        "targets": config.targets,
    }


if __name__ == "__main__":
    run_program(main, CompareConfig, study.arguments(sys.argv[1:], SMOKE))
