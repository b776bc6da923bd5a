"""Trains a flow and a GPT-2 of the same size on one text, and tunes both on another, the flow at several depths."""

from pathlib import Path

from levanter.utils.jax_utils import parameter_count

from experiments.adaptive_depth.plan import AdaptiveDepthConfig, arms
from experiments.adaptive_depth.report import AdaptiveDepth, Settings, Trained, draw, page
from experiments.counts import reached
from experiments.jobs import Job, reported
from experiments.measure import Measure
from experiments.study import Study
from qkvflow.runs.evaluate import RunEvaluator
from qkvflow.runs.load import Run
from qkvflow.tracking import read_metrics


def make(config: AdaptiveDepthConfig, run_dir: Path) -> AdaptiveDepth:
    texts = config.texts(run_dir / "texts")
    all_arms = arms(config, texts, run_dir)
    planned = reported(all_arms, config.seeds)
    results = Measure(Trained, config, run_dir, _sizes).all(planned)
    recipes = {(job.arm.what.kind, job.arm.text): job.recipe for job in planned}
    steps = {kind: recipe.steps for (kind, _), recipe in recipes.items()}
    alone = {text: recipe for (kind, text), recipe in recipes.items() if kind == "scratch"}
    return AdaptiveDepth(
        settings=Settings(
            layers=config.layers,
            pretrain=steps["pretrain"],
            tune=steps["full"],
            seeds=config.seeds,
            form=next(arm.recipe.config.model.block.form for arm in all_arms if arm.what.system == "flow"),
            kinds=config.kinds,
            noted=config.noted,
        ),
        texts={text.name: text.sizes() for text in texts},
        results=results,
        counts={text.name: reached(config.batches, recipe, text) for text, recipe in alone.items()},
    )


def _sizes(job: Job, run: Run, evaluator: RunEvaluator) -> dict[str, float | None]:
    first, size = read_metrics(job.recipe.run.metrics)[0], parameter_count(run.model)
    found = {key: first.get(f"finetune/{key}", size) for key in ("parameters", "trained_parameters")}
    return found | {"before": first.get("finetune/eval_loss_before")}


STUDY = Study("adaptive_depth", AdaptiveDepthConfig, AdaptiveDepth, make, page, figures=draw, page_name="table.md")

if __name__ == "__main__":
    STUDY.program()
