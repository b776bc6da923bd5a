"""FLOPs of a training whose depth grows or is random: the metrics of each stage, their total, and that of studies."""

import shutil
from types import SimpleNamespace

import pytest
from levanter.schedule import BatchSchedule, ScheduleStep
from support.tiny import FLOW, tiny

from experiments.cost import cost_of
from qkvflow.config import decode
from qkvflow.runs import TrainConfig
from qkvflow.tracking import read_metrics
from qkvflow.train_lm import main
from qkvflow.training.loop import Stages

STEPS = 6
GROW = {"grow": {"0.0": 1, "0.5": 4}}
RANGE = {"min": 3, "max": 12}  # 3, 6 or 12
VOCAB, LENGTH, BATCH = 257, 32, 2


def config(folder, **depth) -> TrainConfig:
    checkpointer = {"keep": [{"every": 4}], "save_interval": None}
    raw = tiny(folder, "a", FLOW | {"depth": depth}, num_train_steps=STEPS, checkpointer=checkpointer)
    return decode(TrainConfig, raw)


def test_the_total_of_a_growing_training_and_after_a_resume(tmp_path):
    given = config(tmp_path, steps=GROW)
    run = main(given)
    each = [3 * m.flops_per_token(VOCAB, LENGTH) * LENGTH * BATCH / 1e9 for m in given.model.stages]
    steps = [each[0]] * 3 + [each[1]] * 3

    def check():
        records = read_metrics(run / "metrics.jsonl")
        totals = [sum(steps[: i + 1]) for i in range(STEPS)]
        assert [r["throughput/total_gflops"] for r in records] == pytest.approx(totals)
        assert [r["throughput/total_tokens"] for r in records] == [LENGTH * BATCH * (i + 1) for i in range(STEPS)]
        done = [r["throughput/gflops_per_second"] * r["throughput/duration"] for r in records]
        assert done == pytest.approx(steps)

    check()
    shutil.rmtree(run / "checkpoints" / "step-5")
    main(given)
    check()


def test_the_total_follows_the_batch_schedule():
    schedule = BatchSchedule([ScheduleStep(0, 2), ScheduleStep(4, 6)])
    stages = Stages((0, 3, 6), (1, 2, 4), (10.0, 20.0, 40.0))
    each = [20, 20, 20, 40, 120, 120, 240, 240]
    assert [stages.flops(n, schedule) for n in range(9)] == [sum(each[:n]) for n in range(9)]
    assert Stages((0,), (None,), (None,)).flops(3, schedule) == 0.0


@pytest.mark.parametrize(
    ("depth", "trained", "read"),
    [
        ({"steps": 6}, [6], 6),
        ({"steps": 6, "time_sampling": "jitter"}, [7], 6),
        ({"steps": RANGE}, [7], 12),
        ({"steps": RANGE, "time_sampling": "jitter"}, [8], 12),
        ({"steps": GROW, "time_sampling": "jitter"}, [2, 5], 4),
        ({"steps": 3, "solver": "heun", "time_sampling": "jitter"}, [8], 6),
    ],
)
def test_evaluations_in_training_and_outside(tmp_path, depth, trained, read):
    """The mean of what is drawn in training, and the model's own grid outside."""
    model = config(tmp_path, **depth).model
    block, head = model.block.flops_per_token(16, LENGTH), 2 * 16 * VOCAB
    flops = [stage.flops_per_token(VOCAB, LENGTH) for stage in model.stages]
    assert flops == pytest.approx([n * block + head for n in trained])
    assert model.flops_per_token(VOCAB, LENGTH) == flops[-1]
    assert model.reading.flops_per_token(VOCAB, LENGTH) == read * block + head
    assert model.reading.plan == model.plan
    assert model.reading.training_plans == ()


def test_adaptive_steps_have_no_count(tmp_path):
    model = config(tmp_path, solver="tsit5", rtol=1e-3).model
    assert model.reading is model
    assert model.flops_per_token(VOCAB, LENGTH) is None


@pytest.mark.parametrize(
    ("depth", "same"), [({"steps": RANGE}, 7), ({"steps": 6, "time_sampling": "jitter"}, 7), ({"steps": 6}, 6)]
)
def test_studies_count_the_evaluations_in_training_once(tmp_path, depth, same):
    """A random number of steps costs what the same number on average costs if it is fixed."""

    def cost(**depth):
        given = config(tmp_path, **depth)
        return cost_of(SimpleNamespace(config=given, tokens=BATCH * LENGTH))

    random, fixed = cost(**depth), cost(steps=same)
    assert random.evaluations == fixed.evaluations == same
    assert random.flops == pytest.approx(fixed.flops)
