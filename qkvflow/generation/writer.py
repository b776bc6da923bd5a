"""Prepares a trained run for generation: model at the requested depth, tokenizer, end-of-text tokens."""

import os
from dataclasses import dataclass
from functools import cached_property

from levanter.models.lm_model import LmHeadModel
from levanter.tokenizers import MarinTokenizer

from qkvflow.data.special_tokens import end_tokens
from qkvflow.depth import solver_by_name
from qkvflow.errors import UserError
from qkvflow.generation.drafting import Drafting
from qkvflow.generation.engine import Engine
from qkvflow.generation.precision import dtype_by_name
from qkvflow.generation.prepare import PreparedModel
from qkvflow.generation.vocabulary import Vocabulary
from qkvflow.models import NeuralOdeLMHeadModel
from qkvflow.models.exits import ExitConfig
from qkvflow.models.shared_cache import EXACT, CacheSharing
from qkvflow.ranges import Steps, check_range
from qkvflow.runs.known_loss import warn_if_lost
from qkvflow.runs.load import Run, load_run


@dataclass(frozen=True)
class Writer:
    """A model prepared for generating text.

    Attributes:
        step: of the checkpoint.
        stop_tokens: any of these ends a text; none if the tokenizer has no such token.
    """

    name: str
    step: int
    prepared: PreparedModel
    tokenizer: MarinTokenizer
    stop_tokens: tuple[int, ...]

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's vocabulary."""
        return Vocabulary(self.tokenizer)

    def engine(self, slots: int, length: int, elastic: bool = False) -> Engine:
        """An engine for texts of up to `length` tokens. It never generates ids beyond those of the tokenizer."""
        return self.prepared.engine(slots, length, self.stop_tokens, len(self.vocabulary), elastic)


def open_writer(
    run: str | os.PathLike,
    checkpoint_step: int | None = None,
    steps: int | None = None,
    solver: str | None = None,
    use_cache: bool = True,
    dtype: str | None = None,
    drafting: Drafting | None = None,
    exits: ExitConfig | None = None,
    sharing: CacheSharing = EXACT,
    exits_vary: bool = False,
    averaged: bool = False,
) -> Writer:
    """Loads a run and evaluates its weights, optionally at another depth, with another solver or precision, with
    `drafting` on a coarse grid, with `exits` for each token (whose limits texts may set, if `exits_vary`), or with a
    cache shared by evaluations.

    Args:
        averaged: see `load_run`.

    Raises:
        UserError: the run or checkpoint does not exist, or its model does not support these options.
    """
    if steps is not None:
        check_range("steps", steps, Steps)
    if solver is not None:
        solver_by_name(solver)
    if dtype is not None:
        dtype_by_name(dtype)
    loaded = load_run(run, checkpoint_step, averaged=averaged)
    model, elsewhere = loaded.model, None
    if steps is not None or solver is not None:
        if not isinstance(model, NeuralOdeLMHeadModel):
            raise UserError(f"{run} is not a flow but a Levanter model with one depth: leave out steps and solver")
        depth = model.config.depth
        model = model.with_depth(depth.on_grid(steps, solver=depth.solver if solver is None else solver))
        if model.config.depth != depth:
            elsewhere = model.config.depth
    writer = writer_of(loaded, model, use_cache, dtype, drafting, exits, sharing, exits_vary)
    if elsewhere is not None:  # after all that may be refused
        warn_if_lost(loaded, model, f"{elsewhere.solver} with {elsewhere.reading_steps} steps")
    return writer


def writer_of(
    run: Run,
    model: LmHeadModel,
    use_cache: bool = True,
    dtype: str | None = None,
    drafting: Drafting | None = None,
    exits: ExitConfig | None = None,
    sharing: CacheSharing = EXACT,
    exits_vary: bool = False,
) -> Writer:
    """A run's model with these options, prepared for generation."""
    ends = end_tokens(run.directory.tokenizer, run.tokenizer)
    prepared = PreparedModel(model, use_cache, dtype, drafting, exits, sharing, exits_vary)
    return Writer(run.directory.place.name, run.step, prepared, run.tokenizer, ends)
