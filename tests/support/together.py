"""Trainings of two seeds as one program, also in a process of their own."""

import os
from pathlib import Path

from support.training import Training

from qkvflow.cli.quiet import quiet_libraries
from qkvflow.config import decode
from qkvflow.runs import TrainConfig
from qkvflow.training.start import FromScratch
from qkvflow.training.together import Trained, train_together

SEEDS, STEPS = (3, 8), 20
# The gradient of the bias of keys, which a softmax does not see, is nothing but rounding: about 1e-9, another in any
# other program. With an epsilon that is not far larger, Adam would make steps of it.
ADAM = {"learning_rate": 3e-3, "warmup": 2, "epsilon": 1e-4}


def together(training: Training, name: str, seeds=SEEDS, steps=STEPS, lanes=None, **changes) -> list[Trained]:
    """The runs `name-SEED`."""
    raws = [training.raw(f"{name}-{seed}", steps, seed=seed, optimizer=ADAM, **changes) for seed in seeds]
    configs = [decode(TrainConfig, raw) for raw in raws]
    with quiet_libraries() as quiet:
        return train_together([(config, FromScratch.of) for config in configs], quiet, lanes)


def train(base: str, name: str, save_interval: str | None) -> None:
    descriptor = os.open(os.path.join(base, f"{name}.output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    together(Training(Path(base)), name, steps=60, checkpointer={"keep": None, "save_interval": save_interval})
