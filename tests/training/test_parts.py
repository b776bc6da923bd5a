"""A batch in parts: the same step as in one, also where not all tokens count."""

import contextlib

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter.tracker
import numpy as np
import optax
import pytest
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample
from levanter.tracker.tracker import NoopTracker

from qkvflow.config import decode
from qkvflow.inside.levanter import bare_step
from qkvflow.models.loss import mean_weight, part_of
from qkvflow.runs.config import TrainConfig
from qkvflow.training.checks import check_devices
from qkvflow.training.step import make_trainer

FLOW = {
    "type": "neuralode",
    "hidden_dim": 16,
    "max_seq_len": 12,
    "block": {"type": "gpt2", "num_heads": 2, "mlp_scale": 2},
    "weights": {"type": "basis", "dim": 2, "smoothness_weight": 0.1},
    "depth": {"steps": 2, "kinetic_weight": 0.1},
}
GPT2 = {"type": "gpt2", "hidden_dim": 16, "max_seq_len": 12, "num_heads": 2, "num_layers": 1}
Batch, Pos, Vocab = hax.Axis("batch", 4), hax.Axis("position", 12), hax.Axis("vocab", 32)
WEIGHTS = np.zeros((4, 12), np.float32)
WEIGHTS[0, :2] = WEIGHTS[1, 3:] = WEIGHTS[3, 5] = 1.0  # the third sequence has none; the last position predicts nothing
WEIGHTS[0, 1] = 0.25


def step(parts: int, weights: np.ndarray, model: dict = FLOW) -> tuple[float, dict, list[np.ndarray]]:
    """Loss, metrics and parameters of a step of plain gradient descent."""
    trainer = {
        "train_batch_size": 4,
        "num_train_steps": 10,
        "per_device_parallelism": parts,
        "mp": "f32",
        "id": "parts",
    }
    config = decode(TrainConfig, {"model": model, "trainer": trainer})
    tokens = hax.named(jax.random.randint(jax.random.PRNGKey(0), (4, 12), 0, 32), (Batch, Pos))
    example = LmExample(tokens, hax.named(jnp.asarray(weights), (Batch, Pos)), AttentionMask.causal())
    with contextlib.ExitStack() as stack:
        stack.enter_context(levanter.tracker.current_tracker(NoopTracker()))
        settled = check_devices(config.trainer)
        trainer = stack.enter_context(make_trainer(config, settled or config.trainer, optax.sgd(1.0)))
        model_key, key = jax.random.split(jax.random.PRNGKey(1))
        built = hax.named_jit(config.model.build, axis_resources=trainer.parameter_axis_mapping)(Vocab, key=model_key)
        state = trainer.initial_state(key, model=built)
        made = eqx.filter_jit(lambda state, batch: bare_step(trainer, state, batch))(state, example)
        arrays = [np.asarray(x) for x in jax.tree.leaves(made.new_state.model) if eqx.is_array(x)]
        return float(made.loss), {name: float(x) for name, x in made.loss_metrics.items()}, arrays


@pytest.mark.parametrize(("parts", "model"), [(1, FLOW), (1, GPT2)])
def test_tokens_of_all_parts_count_the_same(parts, model):
    """Levanter averages the means of the parts; of one without a token that counts, its gradient is NaN."""
    loss, metrics, arrays = step(-1, WEIGHTS, model)
    own, own_metrics, own_arrays = step(parts, WEIGHTS, model)
    assert own == pytest.approx(loss, rel=1e-5)
    for name, value in metrics.items():
        assert own_metrics[name] == pytest.approx(value, rel=1e-5), name
    for one, other in zip(own_arrays, arrays, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)  # sums in another order, in fp32


def test_plain_text_is_what_it_was():
    """Where all tokens count, the share of a part is exactly 1."""
    weights = hax.ones((Batch, Pos))
    loss = jnp.float32(1.2345678)
    assert part_of(loss, weights["batch", 0:1], mean_weight(weights)) == loss
    nothing = hax.zeros((Batch, Pos))
    assert part_of(loss, nothing, mean_weight(nothing)) == 0.0
