"""Changes one part of a model at a time and measures the effect: the same text in the same order, paired by seed.

To add an ablation, add a group to the YAML; `--only GROUP,...` runs some of the groups.
"""

from pathlib import Path

from experiments.ablations import report
from experiments.ablations.plan import AblationsConfig, plan, settings
from experiments.ablations.report import Ablations, Trained
from experiments.measure import Measure
from experiments.study import Study


def make(config: AblationsConfig, run_dir: Path) -> Ablations:
    text = config.text.prepare(run_dir / "texts")
    of = plan(config, text, run_dir)
    arms = list({arm.label: arm for arm in of.values()}.values())
    results, selection = Measure(Trained, config, run_dir).search_and_report(arms)
    groups = {}
    for name in config.chosen:
        group = config.groups[name]
        begins = settings({"base": group.base or config.base, **group.overrides})
        about = {arm: report.About(of[name, arm].label, settings(changes)) for arm, changes in group.arms.items()}
        groups[name] = report.Asked(group.question, group.reference, begins, about, group.places, group.by)
    steps, longest = sorted({arm.recipe.steps for arm in arms}), max((a.recipe for a in arms), key=lambda r: r.steps)
    models = {a.label: report.Described(a.cost.parameters, a.cost.evaluations, a.recipe.raw["model"]) for a in arms}
    protocol = report.AblationsProtocol.of(config, text, longest, steps=steps, groups=groups)
    return Ablations(protocol=protocol, models=models, results=results, selection=selection)


STUDY = Study("ablations", AblationsConfig, Ablations, make, report.page, report.files, report.draw)

if __name__ == "__main__":
    STUDY.program()
