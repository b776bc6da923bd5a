"""Tasks of lm-evaluation-harness in this process: numbers are those of a direct computation."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import qkvflow
from qkvflow import eval_lm
from qkvflow.cli import parse
from qkvflow.errors import UserError
from qkvflow.evaluation.tasks import TaskReading
from qkvflow.runs import load_run

OLD = Path(__file__).parents[1] / "support" / "old_runs"
WORDS = ("the", "for", "statement", "import", "a", "class", "return")
QUESTIONS = [{"q": WORDS[i], "choices": [WORDS[(i + k) % 7] for k in (1, 2, 4)], "gold": i % 3} for i in range(6)]


@pytest.fixture
def folder(tmp_path):
    """Tasks of one's own: choices, whole texts, and texts to be written."""
    (tmp_path / "tasks").mkdir()
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    data = {"dataset_path": "json", "test_split": "test"}
    data["dataset_kwargs"] = {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path / "cache")}
    tasks = {
        "own_choices": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{q}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "gold",
            "metric_list": [{"metric": "acc"}],
        },
        "own_texts": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{q}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
        "own_writing": {
            "output_type": "generate_until",
            "doc_to_text": "{{q}}",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["e"], "max_gen_toks": 4, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in tasks.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, **task}))
    return tmp_path / "tasks"


def run_eval(*words):
    return eval_lm.main(parse(eval_lm.EvalConfig, [str(word) for word in words])[0])


def test_results_of_other_tasks_and_settings_stay(tmp_path):
    """Of the same checkpoint. The same task, depth and settings are replaced."""
    run = SimpleNamespace(path=tmp_path, step=7)

    def evaluate(steps: int, tasks: dict, **settings) -> list[dict]:
        config = eval_lm.EvalConfig(run="r", tasks="some", **settings)
        found = eval_lm._with_earlier(run, [TaskReading("euler", steps, tasks)], config)
        (tmp_path / "evaluation").mkdir(exist_ok=True)
        content = {"checkpoint_step": run.step, "readings": found}
        (tmp_path / "evaluation" / "tasks.json").write_text(json.dumps(content))
        return [(reading["steps"], reading["num_fewshot"], reading["tasks"]) for reading in found]

    assert evaluate(6, {"a": {"acc": 0.1}}) == [(6, None, {"a": {"acc": 0.1}})]
    both = {"a": {"acc": 0.1}, "b": {"acc": 0.2}}
    assert evaluate(6, {"b": {"acc": 0.2}}) == [(6, None, both)]
    assert evaluate(6, {"b": {"acc": 0.3}}, num_fewshot=2) == [(6, None, both), (6, 2, {"b": {"acc": 0.3}})]
    both["a"] = {"acc": 0.5}
    assert evaluate(6, {"a": {"acc": 0.5}})[0] == (6, None, both)
    assert len(evaluate(3, {"a": {"acc": 0.6}})) == 3
    run.step = 8
    assert evaluate(6, {"a": {"acc": 0.7}}) == [(6, None, {"a": {"acc": 0.7}})]
    (tmp_path / "evaluation" / "tasks.json").write_text("[]")
    assert len(evaluate(6, {"a": {"acc": 0.7}})) == 1


@pytest.mark.slow
def test_tasks_are_a_direct_computation(folder, tmp_path):
    """At two depths; the size of a batch changes nothing but rounding."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not here: make setup EXTRA=dev,eval")
    run = Path(shutil.copytree(OLD / "flow", tmp_path / "flow"))
    words = ["--run", run, "--tasks", "own_choices,own_texts,own_writing", "--tasks_folder", folder, "--steps", "3,5"]
    found = run_eval(*words)
    assert [reading.steps for reading in found] == [3, 5]
    assert json.loads((run / "evaluation" / "tasks.json").read_text())["readings"][1]["steps"] == 5
    for reading in found:
        acc, bits = expected(run, reading.steps)
        assert reading.tasks["own_choices"]["acc"] == pytest.approx(acc, abs=1e-9)
        assert reading.tasks["own_texts"]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    again = run_eval(*words[:-1], "3", "--batch_size", "1")
    for task, values in found[0].tasks.items():
        assert again[0].tasks[task] == pytest.approx(values, rel=1e-5, nan_ok=True)


def expected(run, steps):
    """The share of choices whose text is likeliest, and bits per byte of the questions behind the token that ends a
    text."""
    _, model, tokenizer = load_run(run)
    model = model.with_depth(model.config.depth.on_grid(steps))

    @eqx.filter_jit
    def log_p(tokens):
        logits = model(hax.named(tokens, ("batch", "position"))).rearrange(("batch", "position", "vocab")).array
        return jax.nn.log_softmax(logits[..., : len(tokenizer)].astype(jnp.float32))[0]

    def told(context, behind):
        row = np.zeros((1, model.Pos.size), np.int32)
        row[0, : len(context) + len(behind)] = [*context, *behind]
        truth = np.asarray(log_p(jnp.asarray(row)))[len(context) - 1 :]
        return sum(truth[k, token] for k, token in enumerate(behind))

    encode, right, bits = tokenizer.encode, 0, 0.0
    for q in QUESTIONS:
        scores = [told(encode(q["q"]), encode(f" {choice}")) for choice in q["choices"]]
        right += int(np.argmax(scores)) == q["gold"]
        bits -= told([tokenizer.eos_token_id], encode(q["q"])) / np.log(2)
    return right / len(QUESTIONS), bits / sum(len(q["q"].encode()) for q in QUESTIONS)


@pytest.mark.slow
def test_tasks_that_there_are_not(folder):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not here: make setup EXTRA=dev,eval")
    with pytest.raises(UserError, match="no task 'nothing'"):
        run_eval("--run", OLD / "flow", "--tasks", "own_choices,nothing", "--tasks_folder", folder)
    (folder.parent / "questions.jsonl").unlink()
    with pytest.raises(UserError, match="own_choices cannot be loaded"):
        run_eval("--run", OLD / "flow", "--tasks", "own_choices", "--tasks_folder", folder)
    with pytest.raises(UserError, match="does not exist"):
        run_eval("--run", OLD / "flow", "--tasks", "own_choices", "--tasks_folder", folder / "none")


def test_without_the_harness(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "qkvflow.generation.harness", raising=False)
    monkeypatch.delattr(qkvflow.generation, "harness", raising=False)
    with pytest.raises(UserError, match="lm_eval is not installed: make setup EXTRA=dev,eval"):
        run_eval("--run", OLD / "flow", "--tasks", "piqa")


def test_keys_that_mean_nothing():
    with pytest.raises(UserError, match="give --tasks"):
        run_eval("--run", OLD / "flow", "--task_limit", "3")
    with pytest.raises(UserError, match="continuity is for losses"):
        run_eval("--run", OLD / "flow", "--tasks", "piqa", "--continuity")


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--steps", "3,300"], "300 evaluations"), (["--steps", "3,90", "--solver", "rk4"], "360 evaluations")],
)
def test_a_depth_that_cannot_be_cached_is_refused_before_any_task(monkeypatch, words, told):
    asked = []
    tasks = SimpleNamespace(read=lambda run, model: asked.append(model))
    monkeypatch.setattr(eval_lm, "Tasks", lambda options: tasks)
    monkeypatch.setattr(eval_lm, "warn_if_lost", lambda *args: asked.append(args))
    with pytest.raises(UserError, match=f"{told}.*at most 256 can be cached"):
        run_eval("--run", OLD / "flow", "--tasks", "own", *words)
    assert not asked
