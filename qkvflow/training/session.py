"""One training run from start to end, for all training programs: directory, data, model, loop, final message."""

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path

import jax
import levanter.tracker
from haliax import Axis
from levanter.callbacks import StepInfo
from levanter.trainer import Trainer
from levanter.trainer_state import TrainerState
from levanter.utils.jax_utils import parameter_count

from qkvflow.config import encode
from qkvflow.models import NeuralOdeConfig
from qkvflow.places import Place
from qkvflow.progress import Console, Progress, describe_loss
from qkvflow.runs.config import TrainConfig
from qkvflow.runs.directory import log_name
from qkvflow.runs.load import unreadable_checkpoint
from qkvflow.runs.prepare import C, PreparedRun, prepare_run
from qkvflow.tracking import start_trackers
from qkvflow.training.checks import check_config, check_devices, check_memory, tree_bytes
from qkvflow.training.corpus import Corpus, open_corpus
from qkvflow.training.levanter_config import configure_jax, levanter_trainer
from qkvflow.training.loop import Outcome, Stages, train
from qkvflow.training.mesh import check_mesh, complete_mesh
from qkvflow.training.share import TrainedShare
from qkvflow.training.start import Start
from qkvflow.training.step import make_trainer, vocabulary
from qkvflow.training.stopping import meet
from qkvflow.training.validation import Validation
from qkvflow.weights import PerLayerConfig
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


def train_run(config: C, start_of: Callable[[PreparedRun[C]], Start], console: Console) -> Trained:
    """Trains in the run directory that `config` names.

    Args:
        start_of: for the opened run directory: where its model comes from. May prepare files in the directory.
        console: where progress is shown.

    Raises:
        UserError: before any work if a setting cannot work.
    """
    check_config(config)
    configure_jax(config.trainer)
    if config.trainer.jax_compilation_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", config.trainer.jax_compilation_cache_dir)
    meet(config.trainer.distributed)
    is_first = jax.process_index() == 0
    progress = Progress(console.terminal if is_first else open(os.devnull, "w"))  # noqa: SIM115
    with prepare_run(config, progress.phase) as run:
        outcome, unigram = _train_in(run, start_of(run), console, progress)
    return Trained(run.directory.location, _last_words(run, outcome, unigram) if is_first else "", outcome.exit_status)


def _train_in(run: PreparedRun[C], start: Start, console: Console, progress: Progress) -> tuple[Outcome, float | None]:
    config, directory = run.config, run.directory
    index = jax.process_index()
    console.log_to(directory.path / log_name(index))
    levanter_config = levanter_trainer(run, progress.phase)
    check_devices(levanter_config)
    optimizer = config.build_optimizer()  # early, because it may be refused
    data_key, _, model_key, training_key = jax.random.split(jax.random.PRNGKey(config.trainer.seed), 4)

    with progress.phase("Preparing data"):
        corpus = open_corpus(run, levanter_config, config.Pos, data_key)
    vocab = vocabulary(config, len(corpus.tokenizer), levanter_config)

    with levanter_config.use_device_mesh():
        shape = start.shape(vocab)
        levanter_config = complete_mesh(levanter_config, shape)
        check_mesh(levanter_config, shape, config.Pos)
        share = TrainedShare.of(shape, start.trainable(shape), optimizer)
        check_memory(levanter_config, config.model, config.Pos, share.checkpoint_bytes)
        run.require_space(share.checkpoint_bytes)
    run.commit(dataclasses.replace(config, vocab_size=vocab.size))

    tracker = start_trackers(
        directory.metrics, directory.tensorboard, run.last_step, config.trainer.tracker, directory.path.name
    )
    try:
        with (
            levanter.tracker.current_tracker(tracker),
            make_trainer(config, levanter_config, optimizer, start.in_step) as trainer,
        ):
            tracker.log_hyperparameters(encode(config))
            what = "Loading the base" if start.is_finetune else "Building the model"
            what = what if run.last_step < 0 else f"Loading checkpoint step-{run.last_step}"
            with progress.phase(what):
                state = _initial_state(trainer, training_key, start, vocab, run, key=model_key)
            progress.say(_headline(run, parameter_count(state.model), corpus))
            validation = Validation(trainer, corpus.validation)
            if start.is_finetune:
                progress.say(share.describe(tree_bytes(state.opt_state)))
                if run.last_step < 0:
                    _log_beginning(state, share, validation, progress, corpus.unigram)
            length = config.Pos.size
            outcome = train(
                trainer,
                state,
                trainer.data_loader(corpus.train).iter_from_step(int(state.step)),
                validation=validation,
                tracker=tracker,
                run=run,
                progress=progress,
                tokens_per_example=length,
                stages=_stages(config, vocab.size),
                unigram=corpus.unigram,
                max_skipped_steps=config.max_skipped_steps,
                sequences_per_epoch=corpus.train_sequences,
            )
    finally:
        tracker.finish()
    return outcome, corpus.unigram


def _initial_state(
    trainer: Trainer, training_key: jax.Array, start: Start, vocab: Axis, run: PreparedRun[C], *, key: jax.Array
) -> TrainerState:
    """A new training state, or that of the checkpoint that the run continues from."""
    mapping = trainer.parameter_axis_mapping
    if run.last_step < 0 and trainer.config.initialize_from is None:
        model = start.fresh(vocab, mapping, key=key)
        return trainer.initial_state(training_key, model=model, is_trainable=start.trainable(model))
    model = start.continued(mapping, key=key)
    try:
        if model is None:
            return trainer.initial_state(training_key, model_init=lambda: start.local_model.build(vocab, key=key))
        return trainer.initial_state(training_key, model=model, is_trainable=start.trainable(model))
    except (ValueError, FileNotFoundError) as error:
        source = trainer.config.initialize_from
        if run.last_step >= 0:
            source = run.directory.checkpoints / f"step-{run.last_step}"
        if source is None:
            raise
        raise unreadable_checkpoint(source, error) from error


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
        if outcome.skipped:
            lines.append(f"({outcome.skipped} steps with non-finite values were skipped)")
        if unigram is not None:
            lines.append(
                "(nats per token; unigram: the loss of single-token frequencies, which a model must beat by far)"
            )
    lines.append(f"To see its curves:          tensorboard --logdir {directory.location / 'tensorboard'}")
    if not outcome.exit_status:
        lines.append(f"To generate text:           {_sample_command(run)}")
    model = run.config.model
    is_flow = isinstance(model, NeuralOdeConfig) and not isinstance(model.weights, PerLayerConfig)
    if not outcome.exit_status and is_flow:
        lines.append(f"To evaluate other depths:   {called('eval')} --run {directory} --steps 3,6,12,24")
    if not outcome.exit_status:
        lines.append(
            f"To use it in Python:        config, model, tokenizer = qkvflow.runs.load_run({str(directory)!r})"
        )
    return "\n".join(lines) + "\n"


def _sample_command(run: PreparedRun[TrainConfig]) -> str:
    model = run.config.model
    is_adaptive = isinstance(model, NeuralOdeConfig) and model.depth.is_adaptive
    steps = f" --steps {model.depth.reading_steps}" if is_adaptive else ""
    return f'{called("sample")} --run {run.directory}{steps} --prompt "The"'
