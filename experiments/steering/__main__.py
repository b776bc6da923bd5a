"""Trains the hybrid on two texts with a control that identifies them, and ordinary layers with a control token; then
tests whether control steers generation."""

import sys
from pathlib import Path

import haliax as hax
import numpy as np
from haliax import Axis

import qkvflow
from experiments.counts import reached
from experiments.jobs import Job, reported
from experiments.measure import Measure
from experiments.steering.controls import Control, between, controls, data_of, report_records, token_of
from experiments.steering.judge import Judge, pieces_of
from experiments.steering.plan import ARMS, SteeringConfig, arms
from experiments.steering.report import Bound, Source, Steering, SteeringProtocol, Trained, draw, files, page
from experiments.study import Study
from experiments.texts import Text
from qkvflow.generation.text import encode_prompt
from qkvflow.runs.evaluate import RunEvaluator, on_other_text
from qkvflow.runs.load import Run

_PIECES = 500  # of each text, for the upper bound
_SHOWN = 2  # samples per control in the results


def make(config: SteeringConfig, run_dir: Path) -> Steering:
    texts = config.texts(run_dir / "texts")
    planned = reported(arms(config, texts, run_dir), config.seeds)
    judge = Judge(*(Path(text.file("select")).read_bytes() for text in texts))
    bound = upper_bound(judge, texts, config.length)

    def steered(job: Job, run: Run, evaluator: None) -> dict[str, object]:
        # Tokens have nothing between the texts.
        asked = {str(u): between(u) for u in config.between if run.config.control_dim or token_of(between(u))}
        asked["none"] = None
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
    sizes = {job.arm.label: job.arm.cost.parameters for job in planned}
    return Steering(protocol=protocol, texts=described, arms=ARMS, parameters=sizes, judge=bound, results=results)


def upper_bound(judge: Judge, texts: list[Text], length: int) -> Bound:
    real = [pieces_of(Path(text.file("report")).read_bytes(), length, _PIECES) for text in texts]
    of_a, of_b = (judge.share_of_b(pieces) for pieces in real)
    return Bound([of_a, of_b], (1 - of_a + of_b) / 2, sum(map(len, real)))


def sample(run: Run, control: Control | None, seed: int, config: SteeringConfig) -> list[bytes]:
    """Texts generated under one control, with the same random numbers for each. They start like a document.

    The token before them ends a document, which occurs equally often in both texts: it does not reveal the source.
    A control token stands in its place, at the start, as in the sequences of training.
    """
    Batch, Pos, is_vector = Axis("batch", config.samples), Axis("position", 1), run.config.control_dim is not None
    first = encode_prompt(run.tokenizer, "") if is_vector or control is None else token_of(control)
    prompt = hax.named(np.full((Batch.size, 1), first, np.int32), (Batch, Pos))
    heard = hax.named(np.asarray(control, np.float32), "control") if is_vector and control is not None else None
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
    is_vector = run.config.control_dim is not None

    def loss(text: Text, kind: str, control: Control | None) -> float:
        path = run_dir / "records" / f"report-{text.name}-{kind}{'' if is_vector else '-token'}.jsonl"
        records = report_records(text, control, path, config.record, None if is_vector else run.config.Pos.size)
        keys = {"validation": records} if is_vector else data_of(validation=records)
        return RunEvaluator(on_other_text(run, keys), max_batches=config.report_batches).loss(run.model)

    each = [{kind: loss(text, kind, own) for kind, own in controls(k).items()} for k, text in enumerate(texts)]
    return {kind: float(np.mean([losses[kind] for losses in each])) for kind in each[0]}


STUDY = Study("steering", SteeringConfig, Steering, make, page, files, draw)

if __name__ == "__main__":
    STUDY.program()
