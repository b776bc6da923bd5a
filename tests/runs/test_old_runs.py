"""Runs that an earlier version made (tests/support/old_runs) still load, evaluate, and continue as they would have."""

import jax
import pytest
from support.earlier import EXPECTED, RUNS, restore
from support.models import heavy
from support.training import losses

from qkvflow import eval_lm, finetune_lm, train_lm
from qkvflow.cli import parse
from qkvflow.runs import TrainConfig, load_run
from qkvflow.runs.config import FinetuneConfig

# Equal bit for bit where they were made. Other processors, and the tests' quick compilation, add up in another order:
# that is a few units in the last place of a loss. A lost moment of Adam, or another batch, changes its third digit.
SAME = {"rel": 2e-6}


@pytest.fixture(autouse=True)
def keys_of_programs():
    """Programs draw with JAX's default; the tests with something that compiles faster."""
    before = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", "threefry2x32")
    yield
    jax.config.update("jax_default_prng_impl", before)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return restore(tmp_path)


@pytest.mark.parametrize("name", RUNS)
def test_it_loads(place, name):
    config, model, tokenizer = run = load_run(f"runs/{name}")
    assert (run.step, config.trainer.id, config.vocab_size) == (3, name, 257)
    assert model.Vocab.size == 257
    assert tokenizer.encode("a") == [97]


@pytest.mark.parametrize(
    ("name", "swept"),
    [("flow", False), ("lora", False), heavy("flow", True), heavy("gpt2", False), heavy("hybrid", True)],
)
def test_it_evaluates_as_before(place, name, swept):
    expected = EXPECTED[name]["readings"][: None if swept else 1]
    sweep = {key: list(dict.fromkeys(r[key] for r in expected)) for key in ("steps", "solver")} if swept else {}
    found = eval_lm.main(eval_lm.EvalConfig(f"runs/{name}", **sweep))
    assert [(r.solver, r.steps) for r in found] == [(r["solver"], r["steps"]) for r in expected]
    for got, want in zip(found, expected, strict=True):
        assert got.loss == pytest.approx(want["loss"], **SAME)
        if "displacement" in want:
            assert got.displacement == pytest.approx(want["displacement"], rel=1e-5)


@pytest.mark.parametrize("name", ["flow", "lora", heavy("gpt2"), heavy("hybrid")])
def test_it_continues_as_before(place, name):
    if name == "lora":
        run = finetune_lm.main(parse(FinetuneConfig, ["--config_path", "lora.yaml"])[0])
    else:
        run = train_lm.main(parse(TrainConfig, ["--config_path", f"{name}.yaml"])[0])
    assert not (run / "changes.jsonl").exists()
    found = losses(run)
    assert list(found) == list(range(8))
    assert [found[step] for step in range(4)] == EXPECTED[name]["train"][:4]  # as they stood there
    assert [found[step] for step in range(4, 8)] == pytest.approx(EXPECTED[name]["train"][4:], **SAME)
