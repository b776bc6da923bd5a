"""The configurations of training and fine-tuning: the contents of a YAML file and of a run's `config.yaml`."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Self

from haliax import Axis
from levanter.callbacks.watch import WatchConfig
from levanter.models.lm_model import LmConfig
from levanter.optim import OptimizerConfig
from levanter.tracker import TrackerConfig
from levanter.trainer import TrainerConfig
from optax import GradientTransformation

from qkvflow.data import DataConfig
from qkvflow.errors import UserError
from qkvflow.models import decay
from qkvflow.ranges import Count, NotNegative, Range, Steps
from qkvflow.runs.adam import ScaledAdamConfig
from qkvflow.runs.base import OfficialConfig
from qkvflow.runs.modes import FinetuneMode

# Keys (with everything below them) that cannot change a run's numbers: where it computes, how often and on how much it
# is evaluated, and where it writes. They may differ when a run is resumed. Apart from rounding, and from what each part
# of an accumulated batch has for itself: masks of dropout, and the sizes of adaptive steps.
FREE_KEYS = (
    "accept_changes",
    "config_path",
    "run_dir",
    "data.auto_build_caches",
    "data.cache_dir",
    "data.cache_options",
    "data.rebuild_caches",
    "data.verify_caches",
    "merge",
    "trainer.checkpointer",
    "trainer.crash_on_inf",
    "trainer.crash_on_nan",
    "trainer.distributed",
    "trainer.jax_compilation_cache_dir",
    "trainer.load_checkpoint",
    "trainer.log_dir",
    "trainer.log_jaxprs",
    "trainer.log_xla_hlo",
    "trainer.max_eval_batches",
    "trainer.mesh",
    "trainer.per_device_eval_parallelism",
    "trainer.per_device_parallelism",
    "trainer.profiler",
    "trainer.require_accelerator",
    "trainer.shutdown_at_exit",
    "trainer.steps_per_eval",
    "trainer.tracker",
    "trainer.use_explicit_mesh_axes",
    "trainer.wandb",
    "trainer.watch",
)


@dataclass
class RunTrainerConfig(TrainerConfig):
    """Levanter's `TrainerConfig` with other defaults.

    Differs from Levanter: its defaults ask for a W&B key and for an accelerator, and compile or trace the
    training step several times for logs.

    Attributes:
        tracker: additional trackers; a run always writes metrics.jsonl and TensorBoard.
        require_accelerator: if true, refuse to train on a CPU.
        watch: log norms of gradients (before clipping) and parameters every `interval` steps, starting with the first,
            as `grad/norm/...`; `interval: 0` disables this.
    """

    tracker: TrackerConfig | tuple[TrackerConfig, ...] = ()
    require_accelerator: bool | None = False
    watch: WatchConfig = field(default_factory=lambda: WatchConfig(interval=0))
    log_jaxprs: bool = False
    log_xla_hlo: bool = False


@dataclass
class TrainConfig:
    """
    Attributes:
        model: `type: neuralode`, or Levanter's own `gpt2`, `llama`, ...
        data: text and tokenizer.
        trainer: Levanter's trainer: steps, batch size, precision, mesh, checkpoints. `trainer.id` names the run.
        optimizer: Levanter's optimizers, `type: adam` by default.
        weight_decay_on: which parameters decay (see `qkvflow.models.decay`).
        run_dir: the run is stored in `<run_dir>/<trainer.id>`.
        train_seq_len: tokens per training sequence; defaults to the model's `max_seq_len`.
        vocab_size: size of the model's vocabulary; by default the tokenizer's, rounded up for the mesh.
        z_loss_weight: weight of the square of the log normaliser, added to the loss.
        max_skipped_steps: how many consecutive steps may be skipped because their loss or update is not finite: such a
            step changes nothing and is logged. With 0, training stops at the first one.
        accept_changes: resume a run even if important keys differ from its `config.yaml` or its data has changed; the
            change is recorded.
        config_path: the YAML file of the configuration.
    """

    model: LmConfig
    data: DataConfig = field(default_factory=DataConfig)
    trainer: RunTrainerConfig = field(default_factory=RunTrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=ScaledAdamConfig)
    weight_decay_on: str = "matrices"
    run_dir: str = "runs"
    train_seq_len: Annotated[int, Range(at_least=2)] | None = None
    vocab_size: Count | None = None
    z_loss_weight: NotNegative = 0.0
    max_skipped_steps: Annotated[int, Range(at_least=0)] = 0
    accept_changes: bool = False
    config_path: str | None = None

    @property
    def Pos(self) -> Axis:
        """The positions of a training sequence."""
        return self.model.max_Pos.resize(self.train_seq_len or self.model.max_seq_len)

    def settled(self, stored: "TrainConfig | None" = None) -> Self:
        """With the defaults of the optimizer that depend on the model filled in.

        Args:
            stored: the configuration of a run that is continued.

        Raises:
            UserError: a default excludes another option.
        """
        if not isinstance(self.optimizer, ScaledAdamConfig):
            return self
        weights, before = getattr(self.model, "weights", None), None if stored is None else stored.optimizer
        return dataclasses.replace(self, optimizer=self.optimizer.settled(weights, before))

    def build_optimizer(self) -> GradientTransformation:
        """The optimizer for all steps of the training, decaying what `weight_decay_on` says.

        Raises:
            UserError: it cannot be built, for example if `warmup` is not a fraction of the steps.
        """
        optimizer = decay.configure(self.settled().optimizer, self.weight_decay_on)
        try:
            return optimizer.build(self.trainer.num_train_steps)
        except (ValueError, TypeError, ArithmeticError, AssertionError) as error:
            raise UserError(
                f"the optimizer cannot be built from `optimizer`: {error or type(error).__name__}"
            ) from error

    @property
    def control_dim(self) -> int | None:
        """Components of the model's control; None for a model without, as all of Levanter's own."""
        control = getattr(self.model, "control", None)
        return None if control is None else control.dim


@dataclass(frozen=True)
class FinetuneDataConfig(DataConfig):
    """`data:` of a fine-tune. The tokenizer is that of the base run; if you name one, it must be the same."""

    tokenizer: str | None = None


@dataclass
class FinetuneConfig(TrainConfig):
    """
    Attributes:
        run: the run directory to start from.
        checkpoint_step: N of its checkpoint step-N; defaults to the last step of a finished run.
        official: a checkpoint of the official implementation to start from instead.
        steps: M, the depth to fine-tune at; defaults to that of the base.
        mode: `{type: flow, refine}`, `{type: full}`, `{type: stack, order}` or `{type: lora, r, alpha, dropout,
            target_modules, train_embeddings, a_init}`.
        merge: for a LoRA run: when it finishes, write an ordinary run with LoRA merged into its weights,
            `<run>-merged`.
        model: do not set it: it follows from the base, `steps` and `mode`, and is recorded in the run's `config.yaml`.
    """

    model: LmConfig | None = None
    data: FinetuneDataConfig = field(default_factory=FinetuneDataConfig)
    run: str | None = None
    checkpoint_step: int | None = None
    official: OfficialConfig | None = None
    steps: Steps | None = None
    mode: FinetuneMode | None = None
    merge: bool = False
