"""The optimizer of a training, which works with its model: Levanter would fail late otherwise, with a stack trace.

Some optimizers that Levanter registers fail in its present version with every model (they use what JAX or Haliax no
longer has); some that orthogonalise matrices fail with matrices that are functions of time.
"""

import equinox as eqx
from haliax import Axis
from levanter.optim import AdamConfig, LionConfig, MuonConfig
from levanter.trainer_state import trainables_only
from optax import GradientTransformation

from qkvflow.errors import UserError, first_line
from qkvflow.runs.config import TrainConfig
from qkvflow.training.checks import model_shape
from qkvflow.training.start import Start

_ANY_SIZE = 257  # of a vocabulary that is not known yet


def working_optimizer(config: TrainConfig, start: Start | None = None) -> GradientTransformation:
    """`config.build_optimizer()`, tried: it makes a step with shapes in place of arrays.

    Adam and Lion are not tried, since they work with every model.

    Args:
        start: where the model comes from, if it is not drawn at random: LoRA trains little of it.

    Raises:
        UserError: it cannot be built, or the step fails.
    """
    optimizer = config.build_optimizer()
    if isinstance(config.optimizer, AdamConfig | LionConfig):
        return optimizer
    Vocab = Axis("vocab", config.vocab_size or _ANY_SIZE)
    shape = model_shape(config.model, Vocab) if start is None else start.shape(Vocab)
    trained = trainables_only(shape, True if start is None else start.trainable(shape))
    try:
        eqx.filter_eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), trained)
    except Exception as error:  # each fails in its own way
        name = config.optimizer.get_choice_name(type(config.optimizer))
        kind, said = type(error).__name__, first_line(error, 200)
        reason = kind if said == kind else f"{kind}: {said}"  # a bare assertion says nothing
        remedy = "Use another: {type: adam}, say"
        if isinstance(config.optimizer, MuonConfig):
            remedy += "; muon needs `use_kimi_scaling: true`, and weights that are constant, per_layer or modulated"
        raise UserError(
            f"`optimizer: {{type: {name}}}` of Levanter fails with this model ({reason}). {remedy}"
        ) from error
    return optimizer
