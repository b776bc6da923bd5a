"""Seeds in parallel: a training step of n seeds as one program, compared with n single steps one after another.

The step is that of training (Adam, donated states, checks for numbers that are not finite), at the size of the small
comparison. `ratio` is the time of the joint step over that of the n single ones in the same round. Meant for a GPU,
which one small training leaves idle; a CPU is busy with one.
"""

import contextlib

import haliax as hax
import jax
import levanter.tracker
from levanter.tracker.tracker import NoopTracker

from experiments.bench.frame import Benchmark, Call, Rows, interleaved, run
from experiments.bench.gradients import SMALL, Vocab, example, flow
from qkvflow.runs.config import RunTrainerConfig, TrainConfig
from qkvflow.training.checks import check_devices
from qkvflow.training.finite import FiniteTrainer
from qkvflow.training.step import make_trainer
from qkvflow.training.together import JointStep

WIDTH, LAYERS, SEQUENCE, BATCH, ROUNDS = 96, 6, 128, 8, 9
AT_ONCE = (1, 2, 4)
CONFIG = TrainConfig(
    flow(WIDTH, SEQUENCE, SMALL, steps=LAYERS),
    trainer=RunTrainerConfig(id="bench", train_batch_size=BATCH, num_train_steps=10**6),
)


def calls(trainer: FiniteTrainer, n: int) -> dict[str, Call]:
    """n single steps, and a joint one; each of the two trains its own n models on and on."""
    batch = example(SEQUENCE, BATCH)

    def states() -> list:
        keys = [jax.random.split(jax.random.PRNGKey(seed)) for seed in range(n)]
        built = [(hax.shard(CONFIG.model.build(Vocab, key=model_key)), key) for model_key, key in keys]
        return [trainer.initial_state(key, model=model) for model, key in built]

    single, joint = states(), JointStep([trainer] * n, states(), n)

    def alone() -> list[float]:
        losses = []
        for i, state in enumerate(single):
            info = trainer.train_step(state, batch)
            single[i] = info.state
            losses.append(info.loss)
        return losses

    def together() -> list[float]:
        return [made.info.loss for made in joint(dict.fromkeys(range(n), batch)).values()]

    return {"alone": alone, "together": together}


def measure() -> Rows:
    check_devices(CONFIG.trainer)
    rows = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(levanter.tracker.current_tracker(NoopTracker()))
        trainer = stack.enter_context(make_trainer(CONFIG, CONFIG.trainer, CONFIG.build_optimizer()))
        for n in AT_ONCE:
            found = interleaved(calls(trainer, n), ROUNDS)
            rows |= {f"{n} seeds, {name}": row for name, row in found.items()}
    return rows


SETTINGS = {"width": WIDTH, "layers": LAYERS, "sequence": SEQUENCE, "batch": BATCH}
BENCHMARKS = (Benchmark("together", SETTINGS, measure),)

if __name__ == "__main__":
    run(BENCHMARKS)
