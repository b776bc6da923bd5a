"""One training run from start to end, for all training programs: directory, data, model, loop, final message."""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic

import equinox as eqx
import jax
import levanter.tracker
from haliax import Axis
from levanter.callbacks import StepInfo
from levanter.trainer import TrainerConfig
from levanter.trainer_state import TrainerState
from levanter.utils.jax_utils import parameter_count

from qkvflow.config import encode
from qkvflow.data import number_of_ids
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeConfig, is_flow
from qkvflow.places import Place
from qkvflow.progress import Console, Progress, describe_loss
from qkvflow.runs.config import TrainConfig
from qkvflow.runs.directory import log_name
from qkvflow.runs.load import unreadable_checkpoint
from qkvflow.runs.prepare import C, PreparedRun, prepare_run
from qkvflow.tracking import RunTracker, read_metrics, start_trackers
from qkvflow.training.checks import check_config, check_devices, check_memory, tree_bytes
from qkvflow.training.corpus import Corpus, open_corpus
from qkvflow.training.finite import FiniteTrainer
from qkvflow.training.levanter_config import configure_jax, levanter_trainer
from qkvflow.training.loop import Outcome, Stages, Training, alone, train
from qkvflow.training.mesh import check_mesh, complete_mesh
from qkvflow.training.optimizer import working_optimizer
from qkvflow.training.share import TrainedShare
from qkvflow.training.start import Start
from qkvflow.training.step import make_trainer, vocabulary
from qkvflow.training.stopping import StopRequest, meet
from qkvflow.training.validation import Validation
from qkvflow_command import called


@dataclasses.dataclass(frozen=True)
class Trained:
    """
    Attributes:
        path: the run directory.
        text: what to tell on standard output: how training ended and what can be done next. Empty but for the first of
            several processes.
        exit_status: 0, or that of the signal that stopped the training; a checkpoint of what was trained is written
            first.
    """

    path: Path | Place
    text: str
    exit_status: int


StartOf = Callable[[PreparedRun[C]], Start]  # for the opened run directory; may prepare files in it


@dataclasses.dataclass(frozen=True)
class Session(Generic[C]):
    """A training that is ready to begin: its directory is open, its text is there, its model fits.

    Attributes:
        start: where its model comes from. trainer: of its steps. tracker: of its metrics. Vocab: axis of its model.
        keys: of its initial model, and of its steps.
    """

    run: PreparedRun[C]
    start: Start
    corpus: Corpus
    share: TrainedShare
    trainer: FiniteTrainer
    tracker: RunTracker
    progress: Progress
    Vocab: Axis
    keys: tuple[jax.Array, jax.Array]

    def begin(self) -> TrainerState:
        """A new training state, or that of the checkpoint that the run continues from."""
        run, progress = self.run, self.progress
        what = "Loading the base" if self.start.is_finetune else "Building the model"
        what = what if run.last_step < 0 else f"Loading checkpoint step-{run.last_step}"
        model_key, training_key = self.keys
        with progress.phase(what):
            state = _initial_state(self.trainer, training_key, self.start, self.Vocab, run, key=model_key)
        if not run.is_committed:  # accepted changes may not fit the checkpoint, and then the run stays as it was
            run.commit()
        progress.say(_headline(run, parameter_count(state.model), self.corpus))
        if self.start.is_finetune:
            progress.say(self.share.describe(tree_bytes(state.opt_state)))
            if run.last_step < 0:
                validation = Validation(self.trainer, self.corpus.validation)
                _log_beginning(state, self.share, validation, progress, self.corpus.unigram)
        return state

    def training(self, done: int, stop: StopRequest, clock: Callable[[], float] = time.monotonic) -> Training:
        """The training from step `done` on; see `train`."""
        config, corpus = self.run.config, self.corpus
        return train(
            self.trainer,
            done,
            self.trainer.data_loader(corpus.train).iter_from_step(done),
            stop=stop,
            validation=Validation(self.trainer, corpus.validation),
            tracker=self.tracker,
            run=self.run,
            progress=self.progress,
            tokens_per_example=config.Pos.size,
            stages=_stages(config, self.Vocab.size),
            unigram=corpus.unigram,
            max_skipped_steps=config.max_skipped_steps,
            sequences_per_epoch=corpus.train_sequences,
            clock=clock,
        )

    def trained(self, outcome: Outcome) -> Trained:
        """What to tell of how it ended."""
        is_first = jax.process_index() == 0
        text = _last_words(self.run, outcome, self.corpus.unigram) if is_first else ""
        return Trained(self.run.directory.location, text, outcome.exit_status)


def train_run(config: C, start_of: StartOf[C], console: Console) -> Trained:
    """Trains in the run directory that `config` names.

    Args:
        start_of: where its model comes from.
        console: where progress is shown.

    Raises:
        UserError: before any work if a setting cannot work.
    """
    begin_process(config)
    with opened(config, start_of, console) as session:
        state = session.begin()
        done = int(state.step)
        with StopRequest() as stop:
            outcome = alone(session.trainer, state, session.training(done, stop))
    return session.trained(outcome)


def begin_process(config: TrainConfig) -> None:
    """What comes first, once in a process: checks without devices, options of JAX, the other processes of the run.

    Raises:
        UserError: a setting cannot work.
    """
    check_config(config)
    join(config.trainer)


def join(trainer: TrainerConfig) -> None:
    """Options of JAX, and the other processes of the run: before the first array, and then no more."""
    configure_jax(trainer)
    if trainer.jax_compilation_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", trainer.jax_compilation_cache_dir)
    meet(trainer.distributed)


@contextlib.contextmanager
def opened(config: C, start_of: StartOf[C], console: Console, copies: int = 1) -> Iterator[Session[C]]:
    """Opens the run directory and all that its training needs, for a `with` block.

    Args:
        copies: how many trainings of this kind are to fit into memory and on the disk.

    Raises:
        UserError: before any work if a setting cannot work.
    """
    is_first = jax.process_index() == 0
    progress = Progress(console.terminal if is_first else open(os.devnull, "w"))  # noqa: SIM115
    with prepare_run(config, progress.phase) as run, _opened(run, start_of(run), console, progress, copies) as session:
        yield session


@contextlib.contextmanager
def _opened(
    run: PreparedRun[C], start: Start, console: Console, progress: Progress, copies: int
) -> Iterator[Session[C]]:
    config, directory = run.config, run.directory
    console.log_to(directory.path / log_name(jax.process_index()))
    levanter_config = levanter_trainer(run, progress.phase)
    check_devices(levanter_config)
    optimizer = working_optimizer(config, start)  # early, because it may be refused
    data_key, _, model_key, training_key = jax.random.split(jax.random.PRNGKey(config.trainer.seed), 4)

    with progress.phase("Preparing data"):
        corpus = open_corpus(run, levanter_config, config.Pos, data_key)
    vocab = vocabulary(config, number_of_ids(corpus.tokenizer), levanter_config)

    with levanter_config.use_device_mesh():
        shape = start.shape(vocab)
        levanter_config = complete_mesh(levanter_config, shape)
        check_mesh(levanter_config, shape, config.Pos)
        stored = eqx.filter_eval_shape(levanter_config.mp.cast_to_param, shape)
        share = TrainedShare.of(stored, start.trainable(stored), optimizer)
        averages = 0 if config.trainer.model_averaging is None else share.trained_bytes
        check_memory(levanter_config, config.model, config.Pos, share.checkpoint_bytes + averages, copies)
        run.require_space(copies * (share.checkpoint_bytes + averages))
    trainer = dataclasses.replace(config.trainer, train_batch_size=levanter_config.train_batch_size)  # if it was -1
    run.config = dataclasses.replace(config, vocab_size=vocab.size, trainer=trainer)
    if run.last_step < 0:
        run.commit()

    tracker = start_trackers(
        directory.metrics, directory.tensorboard, run.last_step, config.trainer.tracker, directory.path.name
    )
    try:
        with (
            levanter.tracker.current_tracker(tracker),
            make_trainer(config, levanter_config, optimizer, start.in_step) as trainer,
        ):
            tracker.log_hyperparameters(encode(config))
            keys = model_key, training_key
            yield Session(run, start, corpus, share, trainer, tracker, progress, vocab, keys)
    finally:
        tracker.finish()


def _initial_state(
    trainer: FiniteTrainer, training_key: jax.Array, start: Start, vocab: Axis, run: PreparedRun[C], *, key: jax.Array
) -> TrainerState:
    """A new training state, or that of the checkpoint that the run continues from."""
    mapping = trainer.parameter_axis_mapping
    if run.last_step < 0 and trainer.config.initialize_from is None:
        model = start.fresh(vocab, mapping, key=key)
        return trainer.initial_state(training_key, model=model, is_trainable=start.trainable(model))
    model = start.continued(mapping, key=key)
    try:
        if model is None:
            state = trainer.initial_state(training_key, model_init=lambda: start.local_model.build(vocab, key=key))
        else:
            state = trainer.initial_state(training_key, model=model, is_trainable=start.trainable(model))
    except (ValueError, FileNotFoundError) as error:
        source = trainer.config.initialize_from
        if run.last_step >= 0:
            source = run.directory.checkpoints / f"step-{run.last_step}"
        if source is None:
            raise
        raise unreadable_checkpoint(source, error) from error
    total = trainer.config.num_train_steps
    if int(state.step) >= total:  # of another run: an own one is refused before
        mode = "flow" if is_flow(run.config.model) else "full"
        raise UserError(
            f"the checkpoint of `trainer.initialize_from` is after {int(state.step)} steps, which count, so that none"
            f" of the {total} is left. Set `trainer.num_train_steps` to more than that, or fine-tune the run:"
            f" {called('finetune')} --run FOLDER --mode '{{type: {mode}}}' --trainer.id NAME"
        )
    return state


def _stages(config: TrainConfig, vocab_size: int) -> Stages:
    """The stages of a training: one, unless the depth of the model grows."""
    model, length = config.model, config.Pos.size
    is_ours = isinstance(model, NeuralOdeConfig)
    models = model.stages if is_ours else (model,)
    flops = [m.flops_per_token(vocab_size, length) for m in models]
    return Stages(
        model.depth.first_steps(config.trainer.num_train_steps) if is_ours else (0,),
        tuple(m.depth.reading_steps if is_ours else None for m in models),
        tuple(None if f is None else 3 * f * length for f in flops),
    )


def _log_beginning(
    state: TrainerState, share: TrainedShare, validation: Validation, progress: Progress, unigram: float | None
) -> None:
    """What a fine-tune begins with: logged with the first step."""
    metrics = share.metrics(tree_bytes(state.opt_state))
    if validation.is_possible:
        with progress.phase("Validating the base"):
            loss = validation.loss(StepInfo(state, 0.0, 0.0))
        progress.say(f"before the first step  {describe_loss(loss, unigram, digits=4)}")
        metrics["finetune/eval_loss_before"] = loss
    levanter.tracker.log(metrics, step=0)


def _headline(run: PreparedRun[TrainConfig], parameters: int, corpus: Corpus) -> str:
    trainer = run.config.trainer
    start = "new run" if run.last_step < 0 else f"continues after step {run.last_step}"
    kind = run.config.model.get_choice_name(type(run.config.model))
    return (
        f"{run.directory} ({start}): {kind}, {parameters:,} parameters, {corpus.train_tokens:,} tokens "
        f"of text, {trainer.num_train_steps} steps on {jax.device_count()} x {jax.devices()[0].device_kind}"
    )


def _last_words(run: PreparedRun[TrainConfig], outcome: Outcome, unigram: float | None) -> str:
    directory = run.directory
    lines = []
    if outcome.exit_status:
        name = signal.Signals(outcome.exit_status - 128).name
        is_begun = outcome.step is not None
        what = f"after step {outcome.step}; a checkpoint was written" if is_begun else "before the first step"
        lines.append(f"Stopped by {name} {what}.")
        lines.append("To resume, run the same command again.")
    else:
        assert outcome.loss is not None
        loss = outcome.validation_loss
        result = f"training loss {outcome.loss:.3f}" if loss is None else describe_loss(loss, unigram)
        lines += [f"Finished: {result}", f"The run is in {directory}"]
        lines += _of_average(run)
        if outcome.skipped:
            lines.append(f"({outcome.skipped} steps with non-finite values were skipped)")
        if unigram is not None:
            lines.append(
                "(nats per token; unigram: the loss of single-token frequencies, which a model must beat by far)"
            )
    lines.append(f"To see its curves:          tensorboard --logdir {directory.location / 'tensorboard'}")
    if not outcome.exit_status:
        lines.append(f"To generate text:           {_sample_command(run)}")
    if not outcome.exit_status and is_flow(run.config.model):
        lines.append(f"To evaluate other depths:   {called('eval')} --run {directory} --steps 3,6,12,24")
    if not outcome.exit_status:
        lines.append(
            f"To use it in Python:        config, model, tokenizer = qkvflow.runs.load_run({str(directory)!r})"
        )
    return "\n".join(lines) + "\n"


def _of_average(run: PreparedRun[TrainConfig]) -> list[str]:
    """What to say of the average of the parameters, which the last validation has read, too."""
    records = read_metrics(run.directory.metrics) if run.config.trainer.model_averaging is not None else []
    loss = records[-1].get("eval/ema/loss") if records else None
    if loss is None:
        return []
    return [f"(the average of the parameters, which --averaged reads: validation loss {loss:.3f})"]


def _sample_command(run: PreparedRun[TrainConfig]) -> str:
    model = run.config.model
    is_adaptive = isinstance(model, NeuralOdeConfig) and model.depth.is_adaptive
    steps = f" --steps {model.depth.reading_steps}" if is_adaptive else ""
    return f'{called("sample")} --run {run.directory}{steps} --prompt "The"'
