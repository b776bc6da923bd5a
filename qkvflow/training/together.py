"""Seeds in parallel: trainings that differ by their seed alone make each step together, as one vmapped program.

The states of n trainings are stacked, one lane for each. Everything else is that of n single trainings: n run
directories, n orders of the data, n loops (`qkvflow.training.loop`), of which each sees the state of its own lane,
sliced when a validation or a checkpoint asks for it. So each run can be continued alone, and equals one made alone up
to the rounding of batched products.

After an interruption, lanes may stand at different steps. Then those behind go first, and the others wait: they are
computed and dropped, so that every step is made by the same program, and the result is the same bit for bit.
"""

import contextlib
import functools
import gc
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter.tracker
import numpy as np
from levanter.tracker import capture_time
from levanter.tracker.wandb import WandbConfig
from levanter.trainer_state import TrainerState

from qkvflow.config import differences, listed
from qkvflow.errors import UserError
from qkvflow.inside.levanter import bare_step
from qkvflow.progress import Console
from qkvflow.runs.config import TrainConfig
from qkvflow.runs.directory import log_name
from qkvflow.runs.prepare import C
from qkvflow.training.finite import FiniteTrainer
from qkvflow.training.loop import Outcome
from qkvflow.training.session import Session, StartOf, Trained, begin_process, opened
from qkvflow.training.stopping import StopRequest

# Keys in which the trainings may differ: the seed, where each is stored, and the base of a fine-tune (its arrays).
_OWN = ("trainer.seed", "trainer.id", "run_dir", "config_path", "run")


def train_together(
    trainings: Sequence[tuple[C, StartOf[C]]], console: Console, lanes: int | None = None
) -> list[Trained]:
    """Trains or resumes runs that differ by their seed alone, each in its own directory.

    Their progress is that of the first. The time of a step is divided by the number of lanes: it is the same for a part
    of a group.

    Args:
        trainings: configurations, and where the models come from; see `train_run`.
        lanes: number of lanes of the program, by default that of the trainings. With as many as before, a part of a
            group is resumed bit for bit.

    Raises:
        UserError: before any work if they differ in another key, or cannot be trained together; later if one of them
            fails: then the others have saved a checkpoint.
    """
    configs = [config for config, _ in trainings]
    _check(configs)
    begin_process(configs[0])
    _check_process()
    lanes = max(lanes or 0, len(trainings))
    now = time.monotonic()  # of the present step: for all, so that their checkpoints fall due together
    stop, outcomes, failed = StopRequest(), dict[int, Outcome](), list[UserError]()
    batches: dict[int, Any] = {}  # of the lanes that have not ended: what their next steps want
    with contextlib.ExitStack() as stack:
        silent = _Silent(console, stack)
        sessions: list[Session[C]] = [
            stack.enter_context(opened(config, start_of, silent if i else console, lanes))
            for i, (config, start_of) in enumerate(trainings)
        ]
        done, step = _begun(sessions, lanes)
        stack.enter_context(stop)
        loops = [
            stack.enter_context(contextlib.closing(session.training(done[i], stop, lambda: now)))
            for i, session in enumerate(sessions)
        ]

        def resume(i: int, made: "Made | None") -> None:
            """Lets a lane's loop work until it wants its next step, or ends."""
            session, loop = sessions[i], loops[i]
            console.log_to(session.run.directory.path / log_name(0))
            with levanter.tracker.current_tracker(session.tracker):
                try:
                    batches[i] = next(loop) if made is None else _tell(session.trainer, loop, made)
                except StopIteration as end:
                    outcomes[i] = end.value
                except UserError as error:
                    # Of the same kind: a search goes on after `Diverged`.
                    failed.append(type(error)(f"{session.run.directory}: {error}"))
                    stop.signal = stop.signal or signal.SIGTERM  # the others save a checkpoint after their next step
            if made is not None:
                done[i] = made.info.next_step

        for i in range(len(sessions)):
            resume(i, None)
        while batches:
            behind = min(done[i] for i in batches)
            wanted = {i: batches.pop(i) for i in sorted(batches) if done[i] == behind}
            made = step(wanted)
            now = time.monotonic()
            for i in wanted:
                resume(i, made[i])
                if made[i].info.forget():
                    gc.collect()  # Levanter's `inference_mode` leaves the model in a cycle of closures
    if failed:
        raise failed[0]
    return [session.trained(outcomes[i]) for i, session in enumerate(sessions)]


@dataclass(frozen=True)
class LaneInfo:
    """What Levanter calls `StepInfo`, of a lane.

    Attributes:
        next_step: steps made. step_duration: the lane's share, in seconds. opt_state: with single numbers only (rates);
            None in place of its arrays. take: gives the whole state, until the next step is made.
    """

    next_step: int
    loss: float
    step_duration: float
    opt_state: Any
    take: Callable[[], TrainerState]

    @property
    def step(self) -> int:
        """The step just made, counted from 0."""
        return self.next_step - 1

    @functools.cached_property
    def state(self) -> TrainerState:
        """Sliced from the stack when first asked for."""
        return self.take()

    def forget(self) -> bool:
        """Lets go of the sliced state: other lanes and the next step need its memory. Returns whether there was one."""
        return self.__dict__.pop("state", None) is not None

    @property
    def model(self) -> Any:
        return self.state.model

    @property
    def eval_model(self) -> Any:
        return self.state.eval_model


@dataclass(frozen=True)
class Made:
    """A step of a lane.

    Attributes:
        metrics: of its loss.
        found: by Levanter's hooks inside the step; None without any.
    """

    info: LaneInfo
    metrics: Mapping[str, Any]
    found: Any


class JointStep:
    """The training step of several lanes, as one program; holds their states.

    It is compiled with the first trainer; the seed is in the states alone.
    """

    def __init__(self, trainers: Sequence[FiniteTrainer], states: list[TrainerState], lanes: int):
        """
        Args:
            states: of the trainers; given away.
            lanes: at least as many; spare ones compute copies of the first that nobody reads.
        """
        self._trainers, self._lanes = list(trainers), lanes
        self._programs: dict[tuple[int, bool], Callable] = {}
        self._steps = [int(state.step) for state in states]
        structure = jax.tree.structure(states[0])  # of all: they differ in static parts that no step uses
        columns = [list(column) for column in zip(*map(jax.tree.leaves, states), strict=True)]
        states.clear()
        leaves = []
        for column in columns:  # one after the other: each lane's array is freed once it is stacked
            leaves.append(_stacked(*column, *column[:1] * (lanes - len(column))))
            column.clear()
        arrays, self._rest = eqx.partition(jax.tree.unflatten(structure, leaves), eqx.is_array)
        # A plain list between steps: to build the state's many small objects takes Python as long as a GPU's step.
        self._arrays, self._structure = jax.tree.flatten(arrays)

    def __call__(self, batches: Mapping[int, Any]) -> dict[int, Made]:
        """One step of the lanes that have a batch, all of which have made equally many; the others stay as they are."""
        first = next(iter(batches))
        active = np.array([i in batches for i in range(self._lanes)])
        given = tuple(batches.get(i, batches[first]) for i in range(self._lanes))
        lead = self._trainers[0]
        before, lead.stage = lead.stage, self._trainers[first].stage
        hooks = any(self._steps[first] % hook.every == 0 for hook in lead.hooks.jit_hooks)
        try:
            with capture_time() as took:
                rest, self._arrays = self._program(lead, hooks)((given, active), self._arrays)
                rest = jax.device_get(rest)  # waits
        finally:
            lead.stage = before
        for i in batches:
            self._steps[i] += 1
        return {i: self._made(i, *rest, took() / self._lanes) for i in batches}

    def _state(self, arrays: Sequence[jax.Array]) -> TrainerState:
        """The state of which these are the arrays: stacked, or of one lane."""
        return eqx.combine(jax.tree.unflatten(self._structure, arrays), self._rest)

    def _program(self, lead: FiniteTrainer, hooks: bool) -> Callable:
        """The compiled step: ((batches, active), arrays of the stacked state) -> ((what a loop reads), new arrays)."""
        if (lead.stage, hooks) not in self._programs:

            def one(state: TrainerState, batch: Any, is_active: jax.Array) -> tuple[Any, TrainerState]:
                result = bare_step(lead, state, batch, hooks=hooks)
                new = jax.tree.map(
                    lambda new, old: jnp.where(is_active, new, old) if eqx.is_array(new) else new,
                    result.new_state,
                    state,
                )
                return (result.loss, result.loss_metrics, result.hook_infos), new

            def all_lanes(given: tuple, arrays: list[jax.Array]) -> tuple[Any, list[jax.Array]]:
                batches, active = given
                with hax.axis_mapping(lead.parameter_axis_mapping):
                    stacked = jax.tree.map(_stacked, *batches)
                    told, state = eqx.filter_vmap(one)(self._state(arrays), stacked, active)
                numbers = jax.tree.map(_number, state.opt_state, is_leaf=_is_of_parameters)
                return (*told, numbers), jax.tree.leaves(eqx.filter(state, eqx.is_array))

            self._programs[lead.stage, hooks] = eqx.filter_jit(all_lanes, donate="all-except-first")
        return self._programs[lead.stage, hooks]

    def _made(self, i: int, loss: Any, metrics: Any, found: Any, numbers: Any, seconds: float) -> Made:
        arrays = self._arrays  # given away in the next step: an error for who comes late
        info = LaneInfo(
            self._steps[i], float(loss[i]), seconds, _lane(numbers, i), lambda: self._state(_taken(arrays, i))
        )
        return Made(info, _lane(metrics, i), _lane(found, i))


def _begun(sessions: Sequence[Session], lanes: int) -> tuple[list[int], JointStep]:
    """The number of steps that each has made, and the step of all."""
    states = []
    for session in sessions:
        with levanter.tracker.current_tracker(session.tracker):
            states.append(session.begin())
    done = [int(state.step) for state in states]
    return done, JointStep([session.trainer for session in sessions], states, lanes)


def _tell(trainer: FiniteTrainer, loop: Any, made: Made) -> Any:
    """Hands a step to the loop of its lane, as Levanter's `train_step` would. Returns the batch of the next."""
    loss, config, info = made.info.loss, trainer.config, made.info
    if (config.crash_on_nan and np.isnan(loss)) or (config.crash_on_inf and np.isinf(loss)):
        return loop.throw(RuntimeError("Loss is NaN" if np.isnan(loss) else "Loss is Inf"))
    with capture_time() as hook_time:
        trainer.run_hooks(info)
        if made.found is not None:
            trainer.hooks.run_jit_hooks_outside_step(info, made.found)
    levanter.tracker.log({**made.metrics, "throughput/hook_time": hook_time()}, step=info.step)
    return loop.send(info)


def _check(configs: Sequence[TrainConfig]) -> None:
    """Raises: UserError: if they cannot be trained together."""
    first = configs[0]
    for other in configs[1:]:
        changes = differences(first, other, _OWN)
        if changes:
            raise UserError(
                f"only trainings that differ by their seed can be trained together, but {first.trainer.id} and"
                f" {other.trainer.id} differ in:\n{listed(changes)}\nTrain them one after another"
            )
    if len({(config.run_dir, config.trainer.id) for config in configs}) < len(configs):
        raise UserError("trainings together need a directory each: give them different names (`trainer.id`)")
    trackers = first.trainer.tracker
    if any(isinstance(one, WandbConfig) for one in (trackers if isinstance(trackers, Sequence) else [trackers])):
        raise UserError(
            "`trainer.tracker` is W&B, which has one run at a time in a process, so it cannot follow several trainings."
            " Leave it out, or train one seed at a time"
        )
    if first.trainer.profiler.is_enabled:
        raise UserError(
            "`trainer.profiler` records one training, and cannot with several together. Leave it out, or train one seed"
            " at a time"
        )


def _check_process() -> None:
    """Raises: UserError: for devices and options of JAX, which must be set by now."""
    numbers = jax.config.jax_default_prng_impl
    if numbers != "threefry2x32":
        raise UserError(
            f"`trainer.jax_config.jax_default_prng_impl` is `{numbers}`, whose random numbers, if vmapped, are not"
            " those of the single trainings. Use threefry2x32, JAX's default, or train one seed at a time"
        )
    if jax.device_count() > 1:
        raise UserError(
            f"seeds are trained together on one device, but there are {jax.device_count()}: a mesh divides one"
            " training. Make one device visible (CUDA_VISIBLE_DEVICES=0, say), or train one seed at a time"
        )


class _Silent:
    """A console that shows nothing: of all but the first of several trainings."""

    def __init__(self, console: Console, stack: contextlib.ExitStack):
        self.terminal = stack.enter_context(open(os.devnull, "w"))  # noqa: SIM115
        self._console = console

    def log_to(self, path: Path) -> None:
        self._console.log_to(path)


@eqx.filter_jit
def _taken(arrays: list[jax.Array], i: Any) -> list[jax.Array]:
    return [array[i] for array in arrays]


def _lane(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i] if isinstance(x, np.ndarray) else x, tree)


def _stacked(*leaves: Any) -> Any:
    return jnp.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0]


def _is_of_parameters(node: Any) -> bool:
    """Whether a part of an optimizer's state has the form of a model or of a parameter."""
    return isinstance(node, eqx.Module | hax.NamedArray)


def _number(leaf: Any) -> Any:
    """A stack of single numbers as it is, and None for one of arrays, or many."""
    return leaf if eqx.is_array(leaf) and leaf.ndim == 1 else None
