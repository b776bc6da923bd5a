"""What the flow adds to the next-token loss in a training step: penalties, and metrics (`train/...`)."""

import jax
import jax.numpy as jnp
from levanter.metrics import Metric, ReductionType

from qkvflow.depth import Solution
from qkvflow.models.neuralode import NeuralOdeLMHeadModel
from qkvflow.weights import BasisConfig, roughness


def penalised(
    model: NeuralOdeLMHeadModel, loss: jax.Array, solution: Solution, *, grows: bool = False
) -> tuple[jax.Array, dict[str, Metric]]:
    """The loss to descend, and the metrics of a training step, averaged over the parts of a batch.

    loss + depth.kinetic_weight * kinetic energy + weights.smoothness_weight * integral of ||dW/dt||^2. Each penalty
    that is asked for is logged by its name, without its weight, and beside it `next_token_loss`, the loss without them
    (with the z-loss, if there is one).

    Args:
        grows: the number of steps is another one in other stages of the training.
    """
    config, found = model.config, {}
    if solution.kinetic is not None:
        found["kinetic_energy"] = (config.depth.kinetic_weight, solution.kinetic)
    if isinstance(config.weights, BasisConfig) and config.weights.smoothness_weight:
        found["weight_roughness"] = (config.weights.smoothness_weight, roughness(model.transformer.flow.weights))
    metrics = {name: value for name, (_, value) in found.items()}
    if found:
        metrics["next_token_loss"] = loss.scalar() if hasattr(loss, "scalar") else loss
    for weight, value in found.values():
        loss = loss + weight * value
    return loss, {name: _mean(value) for name, value in metrics.items()} | _costs(model, solution, grows)


def _costs(model: NeuralOdeLMHeadModel, solution: Solution, grows: bool) -> dict[str, Metric]:
    """What the plan did not say beforehand: the costs of an adaptive solve, steps that were drawn or grow."""
    if solution.statistics is not None:
        statistics = solution.statistics
        return {
            "depth_steps": _mean(statistics.steps - statistics.rejected),
            "depth_evaluations": _mean(statistics.evaluations),
            "depth_rejected_steps": _mean(statistics.rejected),
        }
    if solution.steps is not None:
        return {"depth_steps": _mean(solution.steps)}
    return {"depth_steps": _mean(model.config.depth.reading_steps)} if grows else {}


def _mean(value) -> Metric:
    return Metric.from_value(jnp.asarray(value, jnp.float32), ReductionType.MEAN)
