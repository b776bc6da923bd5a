"""`trainer.model_averaging`: the average of the parameters over steps is kept, and can be loaded."""

import numpy as np
import pytest
from support.training import Training

from qkvflow.errors import UserError
from qkvflow.runs import load_run

BETA = 0.75
CONSTANT = {"lr_schedule": "constant", "warmup": 0, "weight_decay": 0.0}


def test_the_average_is_that_of_the_steps(tmp_path):
    """After one step: beta times the initial parameters, and 1 - beta times those after it. In fp32."""
    training, ema = Training(tmp_path), {"model_averaging": {"type": "ema", "beta": BETA}}
    still = training.run("still", 1, optimizer={"learning_rate": 0.0, **CONSTANT})
    moved = training.run("moved", 1, optimizer={"learning_rate": 0.1, **CONSTANT}, **ema)
    first, last, averaged = (
        np.asarray(run.model.transformer.blocks.stacked.mlp.c_fc.weight.array)
        for run in (load_run(still), load_run(moved), load_run(moved, averaged=True))
    )
    assert np.abs(last - first).max() > 0.05
    np.testing.assert_allclose(averaged, BETA * first + (1 - BETA) * last, rtol=0, atol=1e-6)
    with pytest.raises(UserError, match=r"has no average to load: it is without trainer\.model_averaging"):
        load_run(still, averaged=True)
