"""Levanter's hooks inside the training step (`trainer.watch`), starting with the first step."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
from levanter.callbacks import StepInfo
from levanter.trainer import TrainerHooks
from levanter.trainer_state import InsideJitInfo, TrainerState
from levanter.utils.jax_utils import zeros_like_tree


class StepHooks(TrainerHooks):
    """Differs from Levanter, which leaves out the first two steps: there gradients are often largest."""

    def run_jit_hooks(self, state: TrainerState, jit_info: InsideJitInfo, force: bool = False) -> tuple[Any, ...]:
        """What each hook finds in the step from `state`; zeros in steps that are not its own."""
        found = []
        for hook in self.jit_hooks:
            shape = eqx.filter_eval_shape(hook.fn.inside_step, state, jit_info)
            found.append(
                jax.lax.cond(
                    force or state.step % hook.every == 0,
                    lambda hook=hook: hook.fn.inside_step(state, jit_info),
                    lambda shape=shape: zeros_like_tree(shape),
                )
            )
        return tuple(found)

    def run_jit_hooks_outside_step(self, info: StepInfo, cb_infos: Sequence[Any], force: bool = False) -> None:
        """Hands on what was found, in the steps of each hook."""
        for hook, found in zip(self.jit_hooks, cb_infos, strict=True):
            if force or info.step % hook.every == 0:
                hook.fn.on_step(info, found)
