"""Trains flows on one grid, on random grids and on growing ones, and evaluates them at depths not seen in training.

Learning rates are selected for each arm at a smaller width, on a grid that grows while the best is at its edge.
`--only` with the reference and some arms makes a part of the page.
"""

from pathlib import Path

from experiments.at_work import at_work
from experiments.continuity.plan import ContinuityConfig, arms
from experiments.continuity.report import Continuity, ContinuityProtocol, Trained, draw, files, page
from experiments.cost import with_memory
from experiments.jobs import reported
from experiments.measure import Measure
from experiments.study import Study


def make(config: ContinuityConfig, run_dir: Path) -> Continuity:
    text = config.text.prepare(run_dir / "texts")
    measure = Measure(Trained, config, run_dir)
    selection, rates = measure.search(arms(config, text, run_dir))
    own = arms(config, text, run_dir, rates)
    with at_work(run_dir):
        whole = {a.what.arm: config.whole(a.what.arm, text, run_dir) for a in own}
        costs = {
            name: with_memory(arm.cost, whole[name], run_dir / "costs" / f"{arm.label}.json")
            for name, arm in ((arm.what.arm, arm) for arm in own)
        }
    results = measure.all(reported(own, config.seeds))
    recipe = whole[config.reference]  # all have its tokens and its number of steps
    protocol = ContinuityProtocol.of(config, text, recipe, steps=recipe.steps, read_at=config.steps_read)
    return Continuity(protocol=protocol, costs=costs, results=results, selection=selection)


STUDY = Study("continuity", ContinuityConfig, Continuity, make, page, files, draw)

if __name__ == "__main__":
    STUDY.program()
