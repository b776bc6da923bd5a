"""Compares language models fairly: the same text in the same order; at equal steps, FLOPs or parameters."""

from pathlib import Path

from experiments.compare.plan import CompareConfig, arms
from experiments.compare.report import CompareProtocol, Comparison, Trained, draw, files, page
from experiments.cost import with_memory
from experiments.jobs import at_work
from experiments.measure import Measure
from experiments.study import Study


def make(config: CompareConfig, run_dir: Path) -> Comparison:
    text = config.text.prepare(run_dir / "texts")
    planned = arms(config, text, run_dir)
    costs = {}
    with at_work(run_dir) as terminal:
        for arm in planned:
            parameters = f"{arm.cost.parameters:,} parameters, {arm.cost.materialised:,} materialised"
            print(f"{arm.label}: {parameters}, {arm.flops:.3g} FLOPs", file=terminal)
            path = run_dir / "costs" / f"{arm.what.system}-d{arm.what.width}.json"
            costs[arm.label] = with_memory(arm.cost, arm.recipe, path)
    results, selection = Measure(Trained, config, run_dir).search_and_report(planned)
    steps, systems = planned[0].recipe.steps, {arm.what.system: config.systems[arm.what.system] for arm in planned}
    protocol = CompareProtocol.of(config, text, planned[0].recipe, steps=steps, systems=systems)
    return Comparison(protocol=protocol, costs=costs, results=results, selection=selection)


STUDY = Study("compare", CompareConfig, Comparison, make, page, files, draw)

if __name__ == "__main__":
    STUDY.program()
