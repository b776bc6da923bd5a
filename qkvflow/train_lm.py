"""Trains a language model from one YAML file into a run directory, and continues the run if it exists."""

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import levanter.tracker
from haliax import Axis
from haliax.partitioning import ResourceMapping, round_axis_for_partitioning
from levanter.models.lm_model import LmExample, LmHeadModel
from levanter.trainer import Trainer, TrainerConfig
from levanter.trainer_state import TrainerState
from levanter.utils.jax_utils import parameter_count

import qkvflow as qkvflow  # registers the models
from qkvflow.cli import run_program
from qkvflow.cli.quiet import Quiet, quiet_libraries
from qkvflow.errors import UserError
from qkvflow.models import NeuralOdeConfig, NeuralOdeLMHeadModel, decay
from qkvflow.models.metrics import depth_metrics
from qkvflow.progress import Progress, describe_loss
from qkvflow.runs.config import TrainConfig
from qkvflow.runs.config_file import encode
from qkvflow.runs.directory import RunDirectory
from qkvflow.runs.load import unreadable_checkpoint, with_local_tokenizer
from qkvflow.runs.prepare import PreparedRun, full_disk_is_told, prepare_run
from qkvflow.tracking import start_trackers
from qkvflow.training.checks import check_config, check_devices, model_shape, tree_bytes
from qkvflow.training.corpus import Corpus, open_corpus
from qkvflow.training.loop import Outcome, train
from qkvflow.training.validation import Validation


def main(config: TrainConfig) -> Path:
    """Trains, and says on standard output where the run lies and what can be done next.

    Returns:
        the run directory.

    Errors: `UserError` before any work if a setting cannot work. `SystemExit` with the signal's status if
    SIGTERM or Ctrl-C stopped the training; a checkpoint is written first.
    """
    check_config(config)
    with quiet_libraries() as quiet:
        for key, value in config.trainer.jax_config.items():
            jax.config.update(key, value)
        if config.trainer.jax_compilation_cache_dir is not None:
            jax.config.update("jax_compilation_cache_dir", config.trainer.jax_compilation_cache_dir)
        config.trainer.distributed.initialize()
        with prepare_run(config) as run, full_disk_is_told(run.directory):
            outcome, unigram = _train_in(run, quiet)
    if jax.process_index() == 0:
        _say_goodbye(run, outcome, unigram)
    if outcome.exit_status:
        raise SystemExit(outcome.exit_status)
    return run.directory.path


def _train_in(run: PreparedRun[TrainConfig], quiet: Quiet) -> tuple[Outcome, float | None]:
    config, directory = run.config, run.directory
    index = jax.process_index()
    quiet.log_to(directory.log if index == 0 else directory.log.with_suffix(f".{index}.log"))
    progress = Progress(quiet.terminal if index == 0 else open(os.devnull, "w"))  # noqa: SIM115
    levanter_config = levanter_trainer(config.trainer, directory)
    check_devices(levanter_config)
    data_key, _, model_key, training_key = jax.random.split(jax.random.PRNGKey(config.trainer.seed), 4)
    Pos = config.model.max_Pos.resize(config.train_seq_len or config.model.max_seq_len)

    with progress.phase("Preparing data"):
        corpus = open_corpus(config, directory, levanter_config, Pos, data_key)
    vocab = vocabulary(config, len(corpus.tokenizer), levanter_config)
    model_config = with_local_tokenizer(config.model, directory.tokenizer)
    optimizer_config = decay.configure(config.optimizer, config.weight_decay_on)
    optimizer = optimizer_config.build(config.trainer.num_train_steps)

    def build_model() -> LmHeadModel:
        return model_config.build(vocab, key=model_key)

    def loss_function(model: LmHeadModel, example: LmExample, *, key=None):
        if isinstance(model, NeuralOdeLMHeadModel) and model.config.depth.is_adaptive:
            loss, statistics = model.next_token_loss_and_statistics(
                example, key=key, logsumexp_weight=config.z_loss_weight
            )
            return loss, depth_metrics(statistics)
        return model.compute_next_token_loss(example, key=key, logsumexp_weight=config.z_loss_weight)

    with levanter_config.use_device_mesh():
        shape = model_shape(model_config, vocab)
        run.require_space(tree_bytes(shape) + tree_bytes(eqx.filter_eval_shape(optimizer.init, shape)))
    run.commit(dataclasses.replace(config, vocab_size=vocab.size))

    tracker = start_trackers(
        directory.metrics, directory.tensorboard, run.last_step, config.trainer.tracker, directory.path.name
    )
    try:
        with (
            levanter.tracker.current_tracker(tracker),
            Trainer(levanter_config, optimizer, loss_function, add_default_hooks=False) as trainer,
        ):
            tracker.log_hyperparameters(encode(config))
            what = "Building the model" if run.last_step < 0 else f"Loading checkpoint step-{run.last_step}"
            with progress.phase(what):
                state = _initial_state(trainer, training_key, build_model, run)
            progress.say(_headline(run, parameter_count(state.model), corpus))
            flops = config.model.flops_per_token(vocab.size, Pos.size)
            outcome = train(
                trainer,
                state,
                trainer.data_loader(corpus.train).iter_from_step(int(state.step)),
                validation=Validation(trainer, corpus.validation),
                tracker=tracker,
                directory=directory,
                progress=progress,
                tokens_per_example=Pos.size,
                flops_per_example=None if flops is None else 3 * flops * Pos.size,
                unigram=corpus.unigram,
            )
    finally:
        tracker.finish()
    return outcome, corpus.unigram


def levanter_trainer(trainer: TrainerConfig, directory: RunDirectory) -> TrainerConfig:
    """A copy of the trainer's configuration that writes into the run directory."""
    checkpointer = dataclasses.replace(
        trainer.checkpointer, base_path=str(directory.checkpoints), append_run_id_to_base_path=False
    )
    # Levanter puts profiles and the like into <log_dir>/<id>.
    return dataclasses.replace(trainer, checkpointer=checkpointer, log_dir=directory.path.parent)


def vocabulary(config: TrainConfig, tokens: int, trainer: TrainerConfig) -> Axis:
    """The model's vocabulary axis: as large as the tokenizer, or as `vocab_size` says if it is larger."""
    if config.vocab_size is None:
        with trainer.use_device_mesh():
            return round_axis_for_partitioning(Axis("vocab", tokens), trainer.parameter_axis_mapping)
    if config.vocab_size < tokens:
        raise UserError(f"`vocab_size` is {config.vocab_size}, but the tokenizer has {tokens} tokens")
    return Axis("vocab", config.vocab_size)


def _initial_state(
    trainer: Trainer, key: jax.Array, build_model: Callable[[], LmHeadModel], run: PreparedRun[TrainConfig]
) -> TrainerState:
    """A new training state, or that of the newest checkpoint (Levanter finds it by itself)."""
    if run.last_step < 0 and trainer.config.initialize_from is None:
        return trainer.initial_state(key, model=_draw(build_model, trainer.parameter_axis_mapping))
    try:
        return trainer.initial_state(key, model_init=build_model)
    except (ValueError, FileNotFoundError) as error:
        source = trainer.config.initialize_from
        if run.last_step >= 0:
            source = run.directory.checkpoints / f"step-{run.last_step}"
        if source is None:
            raise
        raise unreadable_checkpoint(Path(source), error) from error


def _draw(build_model: Callable[[], LmHeadModel], mapping: ResourceMapping) -> LmHeadModel:
    """The initial model, sharded.

    Differs from Levanter, which compiles this together with the optimizer's state at full effort: most of the
    time to the first step then goes into random numbers that are drawn once.
    """
    options = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None

    def arrays():
        return eqx.filter(hax.shard(build_model(), mapping), eqx.is_array)

    shape = eqx.filter_eval_shape(build_model)
    static = eqx.filter(shape, lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct))
    return eqx.combine(jax.jit(arrays, compiler_options=options)(), static)


def _headline(run: PreparedRun[TrainConfig], parameters: int, corpus: Corpus) -> str:
    trainer = run.config.trainer
    start = "new run" if run.last_step < 0 else f"continues after step {run.last_step}"
    kind = run.config.model.get_choice_name(type(run.config.model))
    return (
        f"{run.directory.path} ({start}): {kind}, {parameters:,} parameters, {corpus.train_tokens:,} tokens "
        f"of text, {trainer.num_train_steps} steps on {jax.device_count()} x {jax.devices()[0].device_kind}"
    )


def _say_goodbye(run: PreparedRun[TrainConfig], outcome: Outcome, unigram: float | None) -> None:
    path = run.directory.path
    lines = []
    if outcome.exit_status:
        name = signal.Signals(outcome.exit_status - 128).name
        lines.append(f"Stopped by {name} after step {outcome.step}; a checkpoint is written.")
        lines.append("To continue, give the same command again.")
    else:
        loss = outcome.validation_loss
        result = f"training loss {outcome.loss:.3f}" if loss is None else describe_loss(loss, unigram)
        lines += [f"Finished: {result}", f"The run is in {path}"]
        if unigram is not None:
            lines.append(
                "(nats per token; unigram: what frequencies of single tokens reach, which a model must beat by far)"
            )
    lines.append(f"To see its curves:          tensorboard --logdir {path / 'tensorboard'}")
    if not outcome.exit_status:
        lines.append(f"To let it write:            {_sample_command(run)}")
    if not outcome.exit_status and isinstance(run.config.model, NeuralOdeConfig):
        lines.append(f"To read it at other depths: python -m qkvflow.eval_lm --run {path} --steps 3,6,12,24")
    if not outcome.exit_status:
        lines.append(f"To use it in Python:        config, model, tokenizer = qkvflow.runs.load_run({str(path)!r})")
    print("\n".join(lines), flush=True)


def _sample_command(run: PreparedRun[TrainConfig]) -> str:
    model = run.config.model
    is_adaptive = isinstance(model, NeuralOdeConfig) and model.depth.is_adaptive
    steps = f" --steps {model.depth.reading_steps}" if is_adaptive else ""
    return f'python -m qkvflow.sample_lm --run {run.directory.path}{steps} --prompt "The"'


if __name__ == "__main__":
    run_program(main, TrainConfig)
