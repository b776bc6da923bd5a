"""Trains the hybrid on two texts under a control that says which is which; then, does control steer what it writes?

    python -m experiments.steering --config experiments/steering/two_texts.yaml [--a.folder DIR] [--b.folder DIR]
    python -m experiments.steering --smoke                (minutes; texts that Python carries)
    python -m experiments.steering --config FILE --redraw (tables and figure, from the JSON)

Every training is a run below `run_dir`. Given again, the command continues where it stopped. Results go to `output`:
`results.json`, `results.md`, `runs.csv` and `figure.png`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from experiments import jobs, study
from experiments.steering import report
from experiments.steering.config import SteeringConfig
from experiments.steering.ngrams import Judge, pieces_of
from experiments.steering.plan import ARMS, planned_jobs
from experiments.steering.steer import steer
from experiments.texts import Text
from qkvflow.cli import run_program
from qkvflow.cli.quiet import quiet_libraries
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
    output = Path(config.output) if config.output else run_dir / "results"
    if not config.redraw:
        config.check()
        run_dir.mkdir(parents=True, exist_ok=True)
        record = _run(config, run_dir)
        output.mkdir(parents=True, exist_ok=True)
        (output / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    path = output / "results.json"
    if not path.is_file():
        raise UserError(f"there are no results in {output}: run the experiment first, without --redraw")
    record = json.loads(path.read_text())
    (output / "results.md").write_text(report.markdown(record))
    report.write_csv(record, output / "runs.csv")
    report.draw(record, output / "figure.png")
    print(report.markdown(record))
    print(f"Written to {output}", flush=True)


def upper_bound(judge: Judge, texts: list[Text], length: int) -> dict[str, Any]:
    """The judge on real pieces of the parts `report`: `shares` of A and of B judged as B, `accuracy`, how many."""
    real = [pieces_of(Path(text.file("report")).read_bytes(), length, _PIECES) for text in texts]
    of_a, of_b = (judge.share_of_b(pieces) for pieces in real)
    return {"shares": [of_a, of_b], "accuracy": (1 - of_a + of_b) / 2, "pieces": sum(map(len, real))}


def _run(config: SteeringConfig, run_dir: Path) -> dict[str, Any]:
    sources = [config.a, config.b]
    texts = [source.prepare(run_dir / "texts") for source in sources]
    planned = planned_jobs(config, texts, run_dir)
    judge = Judge(*(Path(text.file("select")).read_bytes() for text in texts))
    bound = upper_bound(judge, texts, config.length)
    with quiet_libraries() as quiet:
        quiet.log_to(run_dir / "experiment.log")
        jobs.use_compilation_cache(run_dir / "compiled")
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
