"""Trains the hybrid on two texts under a control that says which is which; then, does control steer what it writes?

    python -m experiments.steering --config experiments/steering/two_texts.yaml [--a.folder DIR] [--b.folder DIR]
    python -m experiments.steering --smoke                (minutes; texts that Python carries)
    python -m experiments.steering --config FILE --redraw (tables and figure, from the JSON)

Every training is a run below `run_dir`. Given again, the command continues where it stopped. Results go to `output`:
`results.json`, `results.md`, `runs.csv` and `figure.png`.
"""

import sys
from pathlib import Path
from typing import Any

from experiments import jobs, study
from experiments.results import kept_in, show
from experiments.steering import report
from experiments.steering.config import SteeringConfig
from experiments.steering.ngrams import Judge, pieces_of
from experiments.steering.plan import ARMS, planned_jobs
from experiments.steering.steer import steer
from experiments.texts import Text
from qkvflow.cli import run_program
from qkvflow.errors import UserError

SMOKE = Path(__file__).parent / "smoke.yaml"
_PIECES = 500  # of each text, for the upper bound


def main(config: SteeringConfig) -> None:
    """Runs, or continues, the experiment.

    Errors: `UserError` if the configuration cannot be, a text is missing, or a model fails the test of causality.
    """
    if config.config_path is None and config.base is None:
        raise UserError(
            "nothing to steer: give --config experiments/steering/two_texts.yaml (its texts by --a.folder DIR and"
            " --b.folder DIR), or --smoke"
        )
    run_dir = config.runs("steering")
    output = config.results(run_dir)
    record = kept_in(output, None if config.redraw else lambda: _run(config, run_dir))
    report.write_csv(record, output / "runs.csv")
    report.draw(record, output / "figure.png")
    show(report.markdown(record), output)


def upper_bound(judge: Judge, texts: list[Text], length: int) -> dict[str, Any]:
    """The judge on real pieces of the parts `report`: `shares` of A and of B judged as B, `accuracy`, how many."""
    real = [pieces_of(Path(text.file("report")).read_bytes(), length, _PIECES) for text in texts]
    of_a, of_b = (judge.share_of_b(pieces) for pieces in real)
    return {"shares": [of_a, of_b], "accuracy": (1 - of_a + of_b) / 2, "pieces": sum(map(len, real))}


def _run(config: SteeringConfig, run_dir: Path) -> dict[str, Any]:
    config.check()
    sources = [config.a, config.b]
    texts = [source.prepare(run_dir / "texts") for source in sources]
    planned = planned_jobs(config, texts, run_dir)
    judge = Judge(*(Path(text.file("select")).read_bytes() for text in texts))
    bound = upper_bound(judge, texts, config.length)
    with jobs.at_work(run_dir) as quiet:
        print(f"The judge is right on {bound['accuracy']:.1%} of {bound['pieces']} real pieces", file=quiet.terminal)
        results = jobs.carry_out(
            planned,
            lambda job: steer(job, config, texts, judge, run_dir),
            weight=lambda job: job.variant.flops,
            loss="report_loss",
            terminal=quiet.terminal,
        )
    first = planned[0].config
    about = {"learning_rate": planned[0].rate, "steps": first["trainer"]["num_train_steps"], "seeds": config.seeds}
    return {
        "protocol": config.settings() | about,
        "texts": [{"name": t.name, "parts": s.parts, "bytes": t.sizes()} for t, s in zip(texts, sources, strict=True)],
        "arms": ARMS,
        "judge": bound,
        "results": results,
        **jobs.origin("experiments.steering"),
    }


if __name__ == "__main__":
    run_program(main, SteeringConfig, study.arguments(sys.argv[1:], SMOKE))
