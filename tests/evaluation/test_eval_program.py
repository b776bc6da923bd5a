"""The evaluation program: on the run's text and on others, and what it says of a flow that is lost."""

import dataclasses
import json
import shutil
import warnings

import haliax as hax
import jax
import numpy as np
import pytest
from support.earlier import restore

from qkvflow import eval_lm
from qkvflow.cli import parse
from qkvflow.depth import DepthConfig
from qkvflow.errors import Notice, UserError
from qkvflow.evaluation import depths
from qkvflow.evaluation.depths import Depths, read
from qkvflow.generation.writer import open_writer
from qkvflow.runs import data_record, load_run
from qkvflow.runs.directory import RunDirectory
from qkvflow.runs.evaluate import RunEvaluator, on_other_text

OTHER = "another text, that no run has ever seen, of some words\n" * 5


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = restore(tmp_path_factory.mktemp("earlier"))
    (folder / "other.txt").write_text(OTHER)
    return folder


@pytest.fixture(autouse=True)
def stand_there(place, monkeypatch):
    monkeypatch.chdir(place)


def evaluate(*words: str) -> list[eval_lm.Reading]:
    return eval_lm.main(parse(eval_lm.EvalConfig, ["--run", "runs/flow", "--checkpoint_step", "3", *words])[0])


def test_a_text_that_is_too_short_is_told_without_keys_of_a_training(place):
    (place / "short.txt").write_text("few")
    with pytest.raises(UserError, match=r"one sequence needs \d+\. Give more text\.$"):
        evaluate("--data.validation", "short.txt")


def test_a_run_is_evaluated_with_its_own_tokenizer_whatever_became_of_its_source(place, tmp_path):
    """Which only a training compares: it would continue with tokens of another meaning."""
    run = load_run("runs/flow", 3)
    source = shutil.copytree(run.directory.tokenizer, tmp_path / "source")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "<|endoftext|>"}))
    data = dataclasses.replace(run.config.data, tokenizer=str(source))
    moved = dataclasses.replace(run, config=dataclasses.replace(run.config, data=data))
    other = {"validation": "other.txt"}
    losses = [RunEvaluator(on_other_text(one, other)).loss(one.model) for one in (run, moved)]
    assert losses[0] == losses[1]
    with pytest.raises(UserError, match="already contains another tokenizer"):
        data.resolve(run.directory.tokenizer)


def test_another_text_is_read_by_the_runs_tokenizer(place):
    (reading,) = evaluate("--data.validation", "other.txt")
    model = load_run("runs/flow", 3).model
    tokens = [*OTHER.encode(), 256]
    whole = np.asarray(tokens[: len(tokens) // 16 * 16]).reshape(-1, 16)
    logits = model(hax.named(whole, ("batch", "position"))).rearrange(("batch", "position", "vocab")).array
    losses = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits))[:, :-1], whole[:, 1:, None], -1)
    assert reading.loss == pytest.approx(losses.mean(), rel=1e-5)
    written = json.loads((place / "runs/flow/evaluation/depth-other.json").read_text())
    assert written["readings"][0]["loss"] == reading.loss
    assert not (place / "runs/flow/evaluation/depth.json").exists()
    folder = place / "elsewhere"
    folder.mkdir()
    (folder / "other.txt").write_text(OTHER[::-1])
    before = {path.name: path.read_text() for path in (place / "runs/flow/evaluation").glob("*.json")}
    evaluate("--data.validation", "elsewhere/other.txt")
    after = {path.name: path.read_text() for path in (place / "runs/flow/evaluation").glob("*.json")}
    assert before.items() < after.items(), "results on another text of the same name are not replaced"
    evaluate("--data.validation", "elsewhere/other.txt")
    assert after.keys() == {path.name for path in (place / "runs/flow/evaluation").glob("*.json")}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data.validation", "missing.txt"], r"missing\.txt does not exist"),
        (["--data.tokenizer", "byte"], "must be that of the run"),
        (["--data.validations", "other.txt"], r"`data\.validations`, did you mean `data\.validation`"),
        (["--data.validation", ""], "empty value"),
        (["--data", "other.txt"], "`data` must be a mapping"),
        (["--max_eval_batches", "0"], "`max_eval_batches` must be at least 1, but is 0"),
        (["--batch_size", "-2"], "`batch_size` must be at least 1"),
        (["--steps", "100000000"], "`steps` must be at least 1 and at most 65536"),
        (["--steps", "4,0"], "`steps` must be at least 1 .* but is 0"),
    ],
)
def test_mistakes_are_named(words, told):
    with pytest.raises(UserError, match=told):
        evaluate(*words)


def test_a_batch_is_no_larger_than_the_text(place):
    """Else a large number would be filled up with nothing, until memory ends."""
    (alone,), (large,) = evaluate("--batch_size", "1"), evaluate("--batch_size", "1000000000")
    assert large.loss == pytest.approx(alone.loss, rel=1e-5)


def test_a_text_that_was_edited_since_the_training_is_told(tmp_path):
    """What is held out of it now may have been trained on."""
    run = load_run("runs/flow", 3)
    own = dict(run.config.data.resolve(run.directory.tokenizer).record)
    directory = RunDirectory(tmp_path / "flow")
    shutil.copytree(run.directory.path, tmp_path / "flow")
    run = dataclasses.replace(run, directory=directory)
    data_record.write(directory.data, own | {next(iter(own)): "1 bytes, sha256 0a"})
    with pytest.warns(Notice, match=r"text\.txt has changed since .*flow was trained"):
        RunEvaluator(run)
    data_record.write(directory.data, own)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        RunEvaluator(run)


def test_what_fills_up_a_batch_is_not_compared(place):
    """The batch is as large as the largest set, but states are those of the first."""
    (place / "short.txt").write_text("a first, short text of two sequences\n")
    parts = {
        name: {"source": {"type": "files", "train": ["text.txt"], "validation": [path]}}
        for name, path in (("first", "short.txt"), ("second", "other.txt"))
    }
    run = on_other_text(load_run("runs/flow", 3), {"components": parts, "train": None})
    evaluator = RunEvaluator(run)
    tokens = evaluator.example().tokens.rearrange(("batch", "position")).array
    assert evaluator.Batch.size == 4
    np.testing.assert_array_equal(tokens.ravel(), list(b"a first, short text of two sequences\n")[:32])


def test_weights_of_components_do_not_hold_for_others(place):
    source = {"source": {"type": "files", "validation": ["other.txt"]}}
    own = {"components": {"own": source}, "train": None, "train_weights": {"own": 0.0}}
    run = on_other_text(on_other_text(load_run("runs/flow", 3), own), {"components": {"new": source}})
    assert list(run.config.data.components) == ["new"]
    assert RunEvaluator(run).loss(run.model) > 0


def test_adaptive_steps_are_evaluated_as_they_are(place):
    """Not on a grid of as many steps as the first trial step is long."""
    run = load_run("runs/flow", 3)
    depth = DepthConfig(solver="tsit5", steps=2, rtol=1e-3)
    run = dataclasses.replace(run, model=run.model.with_depth(depth))
    (model,) = Depths().models(run)
    assert model.config.depth.is_adaptive
    (fixed,) = Depths(steps=(2,)).models(run)
    assert not fixed.config.depth.is_adaptive
    evaluator = RunEvaluator(run)
    reading = read(model, evaluator, evaluator.example())
    assert reading.evaluations > 6 * reading.steps > 0
    assert reading.loss == pytest.approx(evaluator.loss(model))


def test_adaptive_steps_that_do_not_arrive_are_an_error(place):
    run = load_run("runs/flow", 3)
    depth = DepthConfig(solver="heun", steps=2, rtol=1e-7, max_steps=3)
    evaluator = RunEvaluator(run)
    with pytest.raises(UserError, match=r"heun did not reach t = 1 within depth\.max_steps"):
        read(run.model.with_depth(depth), evaluator, evaluator.example())


def test_what_was_read_before_an_interruption_is_kept(place, monkeypatch):
    """Ctrl-C at the second of three depths: the first is in the file."""
    evaluated = []

    def interrupted(model, *rest):
        if evaluated:
            raise KeyboardInterrupt
        evaluated.append(model)
        return read(model, *rest)

    monkeypatch.setattr(depths, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate("--steps", "2,3,4")
    written = json.loads((place / "runs/flow/evaluation/depth.json").read_text())
    assert [reading["steps"] for reading in written["readings"]] == [2]


def test_a_flow_that_is_lost_is_told_by_the_loss_that_the_run_knows(place, capfd):
    metrics = place / "runs/flow/metrics.jsonl"
    known = metrics.read_text()
    evaluate("--steps", "3,4")
    assert "lost" not in capfd.readouterr().err
    records = [json.loads(line) for line in known.splitlines()]
    for record in records:
        if "eval/loss" in record:
            record["eval/loss"] = 4.0
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    try:
        evaluate("--steps", "3,4")
        told = capfd.readouterr().err
        assert "warning: the flow of runs/flow does not work at this depth" in told
        assert "was 4.000 in training, and is now: euler with 3 steps 4.9" in told
        with pytest.warns(match="does not work at this depth.*heun with 3 steps"):
            open_writer("runs/flow", 3, solver="heun")
    finally:
        metrics.write_text(known)


def test_readings_that_cannot_be_written_are_shown_all_the_same(place, capfd):
    folder = place / "runs/gpt2/evaluation"
    folder.write_text("a file")
    with pytest.warns(match="cannot be written to runs/gpt2/evaluation"):
        eval_lm.main(eval_lm.EvalConfig("runs/gpt2", max_eval_batches=1))
    assert "perplexity" in capfd.readouterr().out
    folder.unlink()
