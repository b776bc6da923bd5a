"""Prepares a model for generation: weights evaluated once, a memory for each evaluation of B, limits checked."""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import numpy as np
from levanter.models.lm_model import LmHeadModel
from levanter.utils.tree_utils import inference_mode

from qkvflow.errors import UserError
from qkvflow.generation.drafting import DraftedModel, Drafting
from qkvflow.generation.engine import Engine
from qkvflow.generation.precision import cast
from qkvflow.generation.recomputed import RecomputedModel
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.cached import CachedFlow, CachedModel, on_fixed_grid
from qkvflow.models.exits import ExitConfig
from qkvflow.models.levanter_twin import merged, twin
from qkvflow.models.shared_cache import EXACT, CacheSharing

# Room for texts is allocated in multiples of this, so that calls of similar length share one compiled step.
LEAST_ROOM, ROOM_UNIT, RECOMPUTED_UNIT = 1024, 256, 1024


class PreparedModel:
    """A model prepared for generation by any number of engines.

    Attributes:
        model: of qkvflow or of Levanter.
        draft_steps: of the drafting grid; 0 without drafting.
        draft_tokens: drafts per pass of the full grid; 0 without drafting.
        exits: the rule, and the limits of texts that have none of their own; None without exits.
        steps: of the flow, or the layers of an ordinary model with a cache; 0 for a model that is recomputed.

    use_cache: False recomputes the whole text for each token. Levanter models other than GPT-2 and Llama are always
        recomputed.
    dtype: `f32` or `bf16`, the precision of the computation; None for that of the weights.
    drafting: draft texts on a coarse grid of the same flow.
    exits: when tokens stop integrating the flow.
    sharing: which evaluations keep keys and values.
    exits_vary: texts may have other limits than those of `exits` (see `SamplingOptions.exits`).

    Raises:
        UserError: the model has adaptive steps, or does not support this drafting, these exits or this cache sharing.
    """

    def __init__(
        self,
        model: LmHeadModel,
        use_cache: bool = True,
        dtype: str | None = None,
        drafting: Drafting | None = None,
        exits: ExitConfig | None = None,
        sharing: CacheSharing = EXACT,
        exits_vary: bool = False,
    ):
        model = merged(model)
        is_flow = isinstance(model, NeuralOdeLMHeadModel)
        if isinstance(model, NeuralOdeLMHeadModel):
            model = on_fixed_grid(model)
            self.control_dim = None if model.config.control is None else model.config.control.dim
        else:
            self.control_dim = None
            model = (twin(model) if use_cache else None) or model
        model = inference_mode(model, True)
        self.max_seq_len = model.Pos.size
        self.is_cached = use_cache and isinstance(model, NeuralOdeLMHeadModel)
        self.draft_steps, self.draft_tokens = (0, 0) if drafting is None else (drafting.steps, drafting.tokens)
        if drafting is not None:
            self._check_drafting(model if is_flow else None, drafting)
        if exits is not None and not (self.is_cached and is_flow):
            raise UserError(
                "Exits need the cache of a flow: leave exit out for a model that is not a flow, and with use_cache:"
                " false."
            )
        if sharing != EXACT and not self.is_cached:
            raise UserError(
                f"cache: {sharing} is for the cache of a flow, and there is no such cache here: leave it out."
            )
        sharing.check(with_exits=exits is not None, with_drafts=drafting is not None)
        self.exits = exits
        self.steps = model.config.depth.reading_steps if isinstance(model, NeuralOdeLMHeadModel) else 0
        given = (dtype, drafting, exits, sharing, exits_vary)
        self.model = _evaluate_weights(model, *given) if self.is_cached else _recomputed(model, dtype)

    def engine(
        self,
        slots: int,
        length: int,
        stop_tokens: Sequence[int] = (),
        vocab_size: int | None = None,
        elastic: bool = False,
    ) -> Engine:
        """An engine for texts of up to `length` tokens, including the prompt."""
        unit = ROOM_UNIT if self.is_cached else RECOMPUTED_UNIT
        room = min(self.max_seq_len, max(LEAST_ROOM, -(-length // unit) * unit))
        return Engine(
            self.model,
            slots=slots,
            length=room,
            stop_tokens=stop_tokens,
            vocab_size=vocab_size,
            control_dim=self.control_dim,
            elastic=elastic,
        )

    def check_length(self, prompt: int, max_new_tokens: int, what: str = "the prompt") -> None:
        """Checks a prompt and the number of new tokens against the context.

        Raises:
            UserError: `prompt` tokens and the new ones do not fit the context.
        """
        check_length(self.max_seq_len, prompt, max_new_tokens, what)

    def check_control(self, control) -> np.ndarray | None:
        """One control, [control] or [position, control], as an array.

        Raises:
            UserError: it does not fit.
        """
        if control is None:
            return None
        if self.control_dim is None:
            raise UserError(
                "This model has no control (`model.control` is null), so it cannot use one. Train a model with"
                " `model.control: {dim: N}`, or leave the control out."
            )
        try:
            given = np.asarray(control)
            with np.errstate(over="ignore"):  # infinite then, and refused
                array = np.asarray(control, np.float32) if given.dtype.kind in "iufO" else None
        except (TypeError, ValueError, OverflowError):
            array = None
        if array is None or array.ndim not in (1, 2) or array.shape[-1] != self.control_dim:
            found = f"{control!r:.80}" if array is None else f"shape {array.shape}"
            raise UserError(f"A control is a list of {self.control_dim} numbers (`model.control.dim`), got {found}.")
        if not np.isfinite(array).all():
            raise UserError(f"A control must be finite numbers, got {control!r:.80}.")
        if array.ndim == 2 and len(array) > self.max_seq_len:
            raise UserError(
                f"A control has {len(array)} rows, one for each position, but the model was trained with"
                f" {self.max_seq_len} positions (model.max_seq_len). Give at most that many."
            )
        return array

    def _check_drafting(self, model: LmHeadModel | None, drafting: Drafting) -> None:
        if not (self.is_cached and isinstance(model, NeuralOdeLMHeadModel)):
            raise UserError(
                "Drafting runs the same flow on a coarse grid and needs its cache: leave draft_steps out for a model"
                " that is not a flow, and with use_cache: false."
            )
        steps = model.config.depth.reading_steps
        if drafting.steps >= steps:
            raise UserError(
                f"draft_steps must be below the {steps} steps of the model, got {drafting.steps}: a draft must cost"
                " less than it saves."
            )


def check_length(max_seq_len: int, prompt: int, max_new_tokens: int, what: str) -> None:
    """`PreparedModel.check_length`, before a model is prepared."""
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
    if prompt < 1:
        raise UserError(f"{what} is empty: a model continues a text, so give at least one token.")
    room = max_seq_len - prompt
    if max_new_tokens > room:
        fix = f"Ask for at most {room} new tokens, or shorten it." if room > 0 else "Shorten it."
        raise UserError(
            f"{what} has {prompt} tokens and {max_new_tokens} new ones are requested, but the model was trained with"
            f" {max_seq_len} positions (model.max_seq_len). {fix}"
        )


@eqx.filter_jit
def _evaluate_weights(
    model: NeuralOdeLMHeadModel,
    dtype: str | None,
    drafting: Drafting | None,
    exits: ExitConfig | None,
    sharing: CacheSharing,
    exits_vary: bool,
) -> CachedModel | DraftedModel:
    evaluated = CachedModel.of(model, exits, sharing, exits_vary)
    full = dataclasses.replace(cast(evaluated, dtype), exit=evaluated.exit)  # thresholds are not rounded
    if drafting is None:
        return full
    coarse = model.with_depth(model.config.depth.on_grid(drafting.steps))
    return DraftedModel(full, cast(CachedFlow.of(coarse.transformer.flow), dtype), drafting.tokens)


def _recomputed(model: LmHeadModel, dtype: str | None) -> RecomputedModel:
    if dtype is not None and isinstance(model, NeuralOdeLMHeadModel):
        model = model.discretise()  # only W(t) is rounded, not the parameters that generate it
    return RecomputedModel(cast(model, dtype))
