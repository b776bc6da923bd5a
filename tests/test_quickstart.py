"""The quickstart as users run it: on one device and on eight, in fp32 and in bf16, and read back."""

import math
from pathlib import Path

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from support.quickstart import train

from qkvflow.runs import load_run
from qkvflow.tracking import read_metrics

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.program


def losses(run: Path) -> np.ndarray:
    return np.asarray([record["train/loss"] for record in read_metrics(run / "metrics.jsonl")])


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def one_device(base) -> Path:
    return train(base, "one", "--trainer.num_train_steps", "4")


@pytest.mark.slow  # tests/training/test_processes.py does it for every kind of model
def test_eight_devices_give_the_numbers_of_one(base, one_device):
    """Fully sharded parameters over 8 virtual devices; sums in another order move the loss by about 1e-6."""
    eight = train(base, "eight", "--trainer.num_train_steps", "4", devices=8)
    assert losses(eight).shape == (4,)
    np.testing.assert_allclose(losses(eight), losses(one_device), atol=1e-4)
    evaluations = [read_metrics(run / "metrics.jsonl")[-1]["eval/loss"] for run in (one_device, eight)]
    assert evaluations[0] == pytest.approx(evaluations[1], abs=1e-4)


def test_the_run_reads_back(one_device):
    config, model, tokenizer = load_run(one_device)
    assert config.model.depth.reading_steps == 6  # it grew from 3
    ids = tokenizer.encode("for x in range")
    assert bytes(ids) == b"for x in range"
    tokens = hax.named(jnp.asarray([ids]), ("batch", "position"))
    logits = model(tokens)
    assert logits.resolve_axis("vocab").size == 257
    # Four steps after a start near ln(257) the model must know that bytes are not all alike. It starts below, because
    # x(0) = 50 E and the head is E: the logit of the current byte is 50 * 128 * 0.02^2 = 2.6, and one in nine repeats.
    assert math.log(257) - 0.4 < losses(one_device)[0] < math.log(257) + 0.15
    assert losses(one_device)[-1] < losses(one_device)[0]
    discrete = model.discretise()(tokens)
    np.testing.assert_allclose(discrete.array, logits.array, atol=1e-5)


@pytest.mark.slow
def test_bf16_follows_fp32(base):
    """Mixed precision: within 2 % of the loss in fp32 after 50 steps. Times stay exact, or it would not train."""
    runs = [train(base, name, "--trainer.num_train_steps", "50", "--trainer.mp", mp) for name, mp in MIXED.items()]
    full, mixed = (losses(run)[-10:].mean() for run in runs)
    assert mixed == pytest.approx(full, rel=0.02)


MIXED = {"full": "f32", "mixed": "p=f32,c=bf16"}
