"""Changes one part of a model at a time, and tells what it does: the same text in the same order, paired over seeds.

    python -m experiments.ablations --config experiments/ablations/wikitext2.yaml [--text.folder DIR] [--only GROUP,...]
    python -m experiments.ablations --smoke                (minutes; a text that Python carries)
    python -m experiments.ablations --config FILE --redraw (tables and figures, from the JSON)

Every training is a run below `run_dir`. Given again, the command continues where it stopped. Results go to `output`:
`results.json`, `results.md`, `summary.csv`, `runs.csv` and a figure for each group. Another ablation is another group
in the YAML.
"""

import sys
from pathlib import Path
from typing import Any

from experiments import jobs, rates, study
from experiments.ablations import figures, tables
from experiments.ablations.config import AblationsConfig
from experiments.ablations.plan import Variant, settings, variants
from experiments.ablations.readings import readings
from experiments.measure import measure
from experiments.rates import Job
from experiments.results import kept_in, show
from experiments.texts import Text
from qkvflow.cli import run_program
from qkvflow.errors import UserError

SMOKE = Path(__file__).parent / "smoke.yaml"


def main(config: AblationsConfig) -> None:
    """Runs, or continues, the ablations.

    Errors: `UserError` if the configuration cannot be, a text is missing, or a model fails the test of causality.
    """
    if not config.groups:
        raise UserError(
            "nothing to ablate: give --config experiments/ablations/wikitext2.yaml (its text by --text.folder DIR), or"
            " --smoke"
        )
    config.check()
    run_dir = config.runs("ablations")
    name = "results" if config.only is None else "results_" + "_".join(config.chosen)
    output = config.results(run_dir, name)
    record = kept_in(output, None if config.redraw else lambda: _run(config, run_dir))
    tables.write_csv(record, output / "summary.csv", output / "runs.csv")
    figures.draw(record, output)
    show(tables.markdown(record), output)


def _run(config: AblationsConfig, run_dir: Path) -> dict[str, Any]:
    text = config.text.prepare(run_dir / "texts")
    planned = variants(config, text, run_dir)
    with jobs.at_work(run_dir) as quiet:
        for variant in planned:
            arms = ", ".join(f"{group}/{arm}" for group, arm in variant.arms)
            print(f"{variant.label}: {arms}; {variant.cost.parameters:,} parameters", file=quiet.terminal)
        found = rates.carry_out(config, planned, lambda job: _measure(job, text, config), quiet)
    return {
        "protocol": _protocol(config, text, planned),
        "models": {
            v.label: {"parameters": v.cost.parameters, "evaluations": v.evaluations, "config": v.raw["model"]}
            for v in planned
        },
        **found,
        **jobs.origin("experiments.ablations"),
    }


def _measure(job: Job[Variant], text: Text, config: AblationsConfig) -> dict[str, Any]:
    """What is read off a training, and off a reported one by other solvers and in other numbers of steps too."""
    found = {"model": job.variant.label, **measure(job, text, config.report_batches, "ablations.json")}
    if job.is_reported and job.variant.places:
        batches = config.read_batches or config.report_batches
        found["readings"] = readings(job, job.variant.places, text, batches)
    return found


def _protocol(config: AblationsConfig, text: Text, planned: list[Variant]) -> dict[str, Any]:
    first = planned[0]
    model_of = {arm: variant.label for variant in planned for arm in variant.arms}
    groups = {name: config.groups[name] for name in config.chosen}
    return {
        **study.protocol(config, text, first.raw["data"]["tokenizer"], first.cost.tokens),
        "steps": sorted({v.raw["trainer"]["num_train_steps"] for v in planned}),
        "read_batches": config.read_batches,
        "groups": {
            name: {
                "question": group.question,
                "reference": group.reference,
                "begins": settings({"base": group.base or config.base, **group.overrides}),
                "arms": {
                    arm: {"model": model_of[name, arm], "settings": settings(changes)}
                    for arm, changes in group.arms.items()
                },
                "places": group.places,
            }
            for name, group in groups.items()
        },
    }


if __name__ == "__main__":
    run_program(main, AblationsConfig, study.arguments(sys.argv[1:], SMOKE))
