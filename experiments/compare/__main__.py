"""Compares language models honestly: the same text in the same order; at equal steps, FLOPs or parameters."""

from pathlib import Path
from typing import TextIO

from experiments.compare.plan import CompareConfig, arms
from experiments.compare.report import CompareProtocol, Comparison, Trained, draw, files, page
from experiments.cost import Cost, with_memory
from experiments.jobs import Arm, at_work
from experiments.measure import Measure
from experiments.study import Study


def make(config: CompareConfig, run_dir: Path) -> Comparison:
    text = config.text.prepare(run_dir / "texts")
    planned = arms(config, text, run_dir)
    with at_work(run_dir) as terminal:
        costs = {arm.label: _with_memory(arm, run_dir, terminal) for arm in planned}
    results, selection = Measure(Trained, config, run_dir).search_and_report(planned)
    steps, systems = planned[0].recipe.steps, {arm.what.system: config.systems[arm.what.system] for arm in planned}
    protocol = CompareProtocol.of(config, text, planned[0].recipe, steps=steps, systems=systems)
    return Comparison(protocol=protocol, costs=costs, results=results, selection=selection)


def _with_memory(arm: Arm, run_dir: Path, terminal: TextIO) -> Cost:
    parameters = f"{arm.cost.parameters:,} parameters, {arm.cost.materialised:,} materialised"
    print(f"{arm.label}: {parameters}, {arm.flops:.3g} FLOPs", file=terminal)
    return with_memory(arm.cost, arm.recipe, run_dir / "costs" / f"{arm.what.system}-d{arm.what.width}.json")


STUDY = Study("compare", CompareConfig, Comparison, make, page, files, draw)

if __name__ == "__main__":
    STUDY.program()
