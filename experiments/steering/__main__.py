"""Trains the hybrid on two texts with a control that identifies them; then tests whether control steers generation."""

import sys
from pathlib import Path

import haliax as hax
import numpy as np
from haliax import Axis

import qkvflow
from experiments.counts import reached
from experiments.jobs import Job, reported
from experiments.measure import Measure, evaluator_on
from experiments.steering.controls import Control, between, controls, report_records
from experiments.steering.judge import Judge, pieces_of
from experiments.steering.plan import ARMS, SteeringConfig, arms
from experiments.steering.report import Bound, Source, Steering, SteeringProtocol, Trained, draw, files, page
from experiments.study import Study
from experiments.texts import Text
from qkvflow.generation.text import encode_prompt
from qkvflow.runs.load import Run

_PIECES = 500  # of each text, for the upper bound
_SHOWN = 2  # samples per control in the results


def make(config: SteeringConfig, run_dir: Path) -> Steering:
    texts = config.texts(run_dir / "texts")
    planned = reported(arms(config, texts, run_dir), config.seeds)
    judge = Judge(*(Path(text.file("select")).read_bytes() for text in texts))
    bound = upper_bound(judge, texts, config.length)

    def steered(job: Job, run: Run, evaluator: None) -> dict[str, object]:
        asked = {str(u): between(u) for u in config.between} | {"none": None}
        samples = {name: sample(run, control, job.seed, config) for name, control in asked.items()}
        judged = {name: judge.share_of_b(pieces) for name, pieces in samples.items()}
        losses = losses_of(run, texts, config, run_dir)
        shown = {name: [s.decode("utf-8", "replace") for s in all_[:_SHOWN]] for name, all_ in samples.items()}
        accuracy = (1 - judged["0.0"] + judged["1.0"]) / 2
        known = {"accuracy": accuracy, "judged_b": judged, "examples": shown}
        return known | {"losses": losses, "report_loss": losses["right"]}

    print(f"The judge is right on {bound.accuracy:.1%} of {bound.pieces} real pieces", file=sys.stderr)
    results = Measure(Trained, config, run_dir, steered).all(planned)
    recipe = planned[0].recipe
    about = {"a": texts[0].name, "b": texts[1].name, "learning_rate": recipe.rate, "steps": recipe.steps}
    each = [reached(config.batches, recipe, text, texts)["report"] for text in texts]
    counts = {n: float(np.mean([own[n] for own in each])) for n in each[0]}
    protocol = SteeringProtocol(**config.rules() | about, counted=recipe.steps * recipe.tokens, counts=counts)
    described = [Source(t.name, s.parts, t.sizes()) for t, s in zip(texts, (config.a, config.b), strict=True)]
    return Steering(protocol=protocol, texts=described, arms=ARMS, judge=bound, results=results)


def upper_bound(judge: Judge, texts: list[Text], length: int) -> Bound:
    real = [pieces_of(Path(text.file("report")).read_bytes(), length, _PIECES) for text in texts]
    of_a, of_b = (judge.share_of_b(pieces) for pieces in real)
    return Bound([of_a, of_b], (1 - of_a + of_b) / 2, sum(map(len, real)))


def sample(run: Run, control: Control | None, seed: int, config: SteeringConfig) -> list[bytes]:
    """Texts generated under one control, with the same random numbers for each. They start like a document.

    The token before them ends a document, which occurs equally often in both texts: it does not reveal the source.
    """
    Batch, Pos = Axis("batch", config.samples), Axis("position", 1)
    prompt = hax.named(np.full((Batch.size, 1), encode_prompt(run.tokenizer, ""), np.int32), (Batch, Pos))
    heard = None if control is None else hax.named(np.asarray(control, np.float32), "control")
    text = qkvflow.generate(
        run.model,
        prompt,
        max_new_tokens=config.length,
        temperature=config.temperature,
        seed=seed * config.samples,
        control=heard,
    )
    rows = np.asarray(text.rearrange((Batch, "position")).array)[:, 1:]
    return [bytes(int(token) for token in row if token < 256) for row in rows]


def losses_of(run: Run, texts: list[Text], config: SteeringConfig, run_dir: Path) -> dict[str, float]:
    """Losses under the right, the wrong and no control; means over the parts `report` of both texts."""

    def loss(text: Text, kind: str, control: Control | None) -> float:
        path = run_dir / "records" / f"report-{text.name}-{kind}.jsonl"
        records = report_records(text, control, path, config.record)
        return evaluator_on(run, records, config.report_batches).loss(run.model)

    each = [{kind: loss(text, kind, own) for kind, own in controls(k).items()} for k, text in enumerate(texts)]
    return {kind: float(np.mean([losses[kind] for losses in each])) for kind in each[0]}


STUDY = Study("steering", SteeringConfig, Steering, make, page, files, draw)

if __name__ == "__main__":
    STUDY.program()
