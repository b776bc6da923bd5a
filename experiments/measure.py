"""One training and its measurements: losses, times, and the causality test that comes first."""

import contextlib
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax import NamedArray
from jax.tree_util import Partial
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmHeadModel

from experiments.at_work import at_work
from experiments.config import SeedsConfig
from experiments.jobs import Arm, Job, Place, Places, at_once, reported, selection, train
from experiments.records import Training, asked_of, kept, stored
from experiments.search import Tried, best, beyond, tried
from experiments.sharing import in_turn
from experiments.texts import PARTS, Text
from qkvflow.errors import UserError
from qkvflow.evaluation.depths import Reading, read
from qkvflow.runs import load_run
from qkvflow.runs.directory import check_name
from qkvflow.runs.evaluate import RunEvaluator, on_other_text
from qkvflow.runs.load import Run
from qkvflow.tracking import read_metrics
from qkvflow.training.finite import Diverged
from qkvflow.training.levanter_config import jax_configured

_SEQUENCES = 2  # for the causality test
# Keys of a record that tell trainings apart.
_OF_TRAINING = {
    "recipe": "other settings",
    "base": "another start",
    "basis": "another basis",
    "text": "another text",
}

T = TypeVar("T", bound=Training)
R = TypeVar("R")
Trains = Callable[[Job], bool]


@dataclass(frozen=True)
class Measure(Generic[T]):
    """How the trainings of a study are measured.

    Attributes:
        kind: class of the records: fields of an arm's `what`, those of `Training`, and others that `more` sets.
        config: of the study. run_dir: of its runs. The records go to `config.readings`, a small file per training: if
            it exists, neither the training nor its run is needed.
        more: other fields of the record of a reported training, from its run and the evaluator on the part `report`,
            which is None for an arm without a text.
        left_out: collects how many trainings were left to other processes; None: waits for these.
        again: the lines about trainings that are known were shown before.
    """

    kind: type[T]
    config: SeedsConfig
    run_dir: Path
    more: Callable[[Job, Run, RunEvaluator | None], Mapping[str, object]] = lambda job, run, evaluator: {}
    left_out: list[int] | None = None
    again: bool = False

    def free_first(self, make: Callable[["Measure[T]"], R]) -> R:
        """What `make` returns. It is called with a copy of this that leaves out what other processes are training and,
        if that was anything, once more with this, which waits."""
        left_out: list[int] = []
        found = make(dataclasses.replace(self, left_out=left_out))
        return make(dataclasses.replace(self, again=True)) if left_out else found

    def search_and_report(self, arms: Sequence[Arm]) -> tuple[list[T], list[T]]:
        """The records of the reported trainings, and of the earlier ones that select learning rates."""

        def make(measure: Measure[T]) -> tuple[list[T], list[T]]:
            searched, chosen = measure.search(arms)
            known = [arm for arm in arms if arm.group in chosen or not self.config.learning_rates]
            return measure.all(reported(known, self.config.seeds, chosen)), searched

        return self.free_first(make)

    def search(self, arms: Sequence[Arm], trains: Trains = lambda job: True) -> tuple[list[T], dict[Hashable, float]]:
        """Trainings with all rates, and the selected rate of each group; a single rate is used as it is. Groups with
        missing trainings have no rate, nor has any without `learning_rates`."""
        rates = self.config.learning_rates
        single = {arm.group: rates[0] for arm in arms if len(rates) == 1}
        jobs = selection(arms, rates, self.config.selection_seeds)
        found, losses = self.grown(jobs, trains, "to choose learning rates by", self.config.beyond_grid)
        return found, single | {of: best(own) for of, own in losses.items()}

    def grown(self, jobs: Sequence[Job], trains: Trains, why: str, most: int) -> tuple[list[T], dict[Hashable, Tried]]:
        """The trainings of a grid of rates, which grows by at most `most` rates for groups whose best is at an edge;
        and the losses of groups without missing trainings."""
        groups = {job.arm.group: job.arm for job in reversed(jobs)}
        seeds = {of: dict.fromkeys(job.seed for job in jobs if job.arm.group == of) for of in groups}
        given = {of: len({job.rate for job in jobs if job.arm.group == of}) for of in groups}
        fresh, found, missing, losses = [*jobs], [], set(), {}
        while fresh:
            found += self.those(fresh, trains, why)
            done = {job.name for job, _ in found}
            missing |= {job.arm.group for job in fresh if job.name not in done}
            losses = {of: tried(r for job, r in found if job.arm.group == of) for of in groups if of not in missing}
            more = {of: beyond(own) for of, own in losses.items() if len(own) < given[of] + most}
            fresh = [Job.of(groups[of], seed, rate, False) for of, rate in more.items() if rate for seed in seeds[of]]
        return [r for _, r in found], losses

    def those(self, jobs: Sequence[Job], trains: Trains, why: str = "to report") -> list[tuple[Job, T]]:
        """The trainings that have records, each described as its arm is now; missing ones are made first, where
        `trains` says so."""
        places = [self._checked_place(job) for job in jobs]
        own = [job for job in jobs if trains(job)]
        if own:
            self.all(own, why)
        there = [(job, stored(*place)) for job, place in zip(jobs, places, strict=True)]
        return [(job, dataclasses.replace(r, **vars(job.arm.what))) for job, r in there if r is not None]

    def all(self, jobs: Sequence[Job], why: str = "to report") -> list[T]:
        """The records of all trainings, with one line of progress for each. Trains missing runs first.

        A training that only selects a learning rate may diverge: its record then has no loss. Processes with the same
        `run_dir` share the trainings, and each returns when all are there, or all but those that are `left_out`.

        Raises:
            UserError: a model sees the future, a reported training diverges (after all others), or an existing run or
                record is of other settings.
        """
        for job in jobs:
            check_name(job.name, "the name of a training, which begins with that of its arm,")
            self._checked_place(job)
        found: dict[str, T] = {}
        failed: dict[str, Diverged] = {}
        spent, worked = 0.0, 0.0
        left = {job.name: job.arm.flops for job in jobs if stored(*self._place(job)) is None}
        told = {job.name for job in jobs} - left.keys() if self.again else set()
        groups = at_once(jobs, self.config.seeds_at_once)
        with at_work(self.run_dir) as terminal:
            if left:
                _check_reports(jobs)
            if left or not self.again:
                print(f"{len(jobs)} trainings {why}, {sum(left.values()):.3g} FLOPs to go", file=terminal)

            def waits(number: int) -> bool:
                if self.left_out is None:
                    print(f"waiting for other processes, which make what is left: {number}", file=terminal)
                    return True
                print(f"left to other processes for now: {number}", file=terminal)
                self.left_out.append(number)
                return False

            own = in_turn(jobs, lambda job: _claims(groups[job.name]), self.run_dir / "claims", waits)
            with contextlib.closing(own):
                for number, job in enumerate(own, 1):
                    start, group = time.monotonic(), groups[job.name]
                    if stored(*self._place(job)) is not None:  # by another process, perhaps
                        left.pop(job.name, None)
                        group = []
                    try:
                        found[job.name] = kept(*self._place(job), functools.partial(self._read, job, group))
                    except Diverged as error:
                        failed[job.name] = error
                        print(f"{number}/{len(jobs)}  {job.name}  failed", file=terminal)
                        continue
                    took = time.monotonic() - start
                    made = sum(left.pop(other.name, 0.0) for other in group)  # by the first of them
                    if made:  # known records would distort the estimate
                        worked, spent = worked + made, spent + took
                    rest = f", about {sum(left.values()) * spent / worked / 60:.0f} min left" if worked else ""
                    loss = found[job.name].report_loss if job.is_reported else found[job.name].select_loss
                    result = "diverged" if loss is None else f"loss {loss:.3f}"
                    if job.name not in told:
                        print(f"{number}/{len(jobs)}  {job.name}  {result}  {took:.0f} s{rest}", file=terminal)
                    jax.clear_caches()
        if failed:
            name, error = next(iter(failed.items()))
            raise Diverged(f"{name}: {error} {len(failed)} of the trainings to report failed; all others are made.")
        return [found[job.name] for job in jobs if job.name in found]

    def _place(self, job: Job) -> tuple[Path, type[T], dict[str, object]]:
        """The path of the record, its class, and everything that it depends on."""
        arm = job.arm
        hashes = {} if arm.text is None else {part: arm.text.hash(part) for part in PARTS}
        base = "-".join(_start(one, arm.text) for one in _bases(job)) or None
        asked = {"recipe": job.recipe.digest(), "base": base, "text": hashes}
        if job.is_reported:
            asked |= {"batches": self.config.report_batches, **(vars(arm.flow) if arm.flow else {}), **arm.asks}
        return self.config.kept_in(self.run_dir) / f"{job.name}.json", self.kind, asked

    def _checked_place(self, job: Job) -> tuple[Path, type[T], dict[str, object]]:
        """Its `_place`. Other measurements of a training whose run is here replace its record; nothing else does.

        Raises:
            UserError: the record is of another training, or of other measurements of one whose run is not here.
        """
        path, kind, asked = self._place(job)
        before, whole = asked_of(path), json.loads(json.dumps(asked))
        other = [words for key, words in _OF_TRAINING.items() if before and before.get(key) != whole.get(key)]
        if other:
            raise UserError(
                f"{path} is the record of a training with {' and '.join(other)}. Nothing was changed. Give another"
                " --run_dir or --readings, or remove this file if it is not needed"
            )
        if before and before != whole and not job.recipe.is_finished:
            changed = ", ".join(sorted(key for key in {*before, *whole} if before.get(key) != whole.get(key)))
            raise UserError(
                f"{path} is the record of a training with other measurements ({changed}), whose run is not here: it"
                " would be trained again. Nothing was changed. Measure as before, give another --readings, or remove"
                " this file to train again"
            )
        return path, kind, asked

    def _read(self, job: Job, group: Sequence[Job]) -> T:
        try:
            _train([other for other in group if stored(*self._place(other)) is None], lanes=len(group))
        except Diverged:
            if len(group) > 1:  # one of them diverged: each is trained alone, when it is its turn
                return self._read(job, [job])
            if job.is_reported:
                raise
            return self.kind(**vars(job.arm.what), seed=job.seed, learning_rate=job.rate)  # without a loss
        with jax_configured(job.recipe.config.trainer):
            return self._measured(job)

    def _measured(self, job: Job) -> T:
        """The record of a finished training."""
        arm, found = job.arm, vars(job.arm.what) | vars(read_training(job))
        if job.is_reported:
            run, evaluator = load_run(job.recipe.run.path), None
            found["causal_at"] = causal_at(run, job.name)
            if arm.text is not None:
                evaluator = evaluator_on(run, arm.text.file("report"), self.config.report_batches)
                found["report_loss"] = evaluator.loss(run.model)
            if arm.flow is not None:
                found["readings"] = readings(run, arm.text, arm.flow, evaluator)
            found |= self.more(job, run, evaluator)
        return self.kind(**found)


def _claims(group: Sequence[Job]) -> list[str]:
    """What is made with a group: its trainings, and those that they start from, unless these are finished."""
    bases = [base for job in group for base in _bases(job) if not base.recipe.is_finished]
    return [job.name for job in [*group, *bases]]


def _bases(job: Job) -> list[Job]:
    """The trainings that it starts from, the next one first."""
    return [] if job.base is None else [job.base, *_bases(job.base)]


def _start(base: Job, text: Text | None) -> str:
    """What a training starts from, with its text unless that is `text`."""
    own = base.arm.text
    return base.recipe.digest() + ("" if own is None or own == text else f":{own.hash('train')[:8]}")


def _check_reports(jobs: Sequence[Job]) -> None:
    """Raises: UserError: a text has less than a sequence to report on, which would show after all trainings only."""
    known = set()
    for job in jobs:
        recipe = [job, *_bases(job)][-1].recipe
        if job.arm.text is None or recipe.config.model is None:  # the latter starts from a run that says its length
            continue
        key = job.arm.text, recipe.raw["data"]["tokenizer"], recipe.config.Pos.size
        if key not in known:
            known.add(key)
            recipe.check_report(job.arm.text)


def _train(jobs: Sequence[Job], lanes: int) -> None:
    """Trains the jobs, and before them those that they start from, where these are missing."""
    bases = {job.base.name: job.base for job in jobs if job.base is not None}
    if bases:
        _train(list(bases.values()), lanes)
    train(*(job.recipe for job in jobs), lanes=lanes)


@dataclass(frozen=True)
class ReadTraining(Training):
    """readings: evaluations of the trained flow at the `Places` of its arm."""

    readings: list[Reading] = field(default_factory=list)

    def at(self, place: Place) -> Reading:
        return next(r for r in self.readings if (r.solver, r.steps) == place)


def readings(run: Run, text: Text, where: Places, evaluator: RunEvaluator) -> list[Reading]:
    """Evaluations of a trained flow with other solvers and numbers of steps, without any training."""
    if where.read_batches is not None:
        evaluator = evaluator_on(run, text.file("report"), where.read_batches)
    depth, example = run.config.model.depth, evaluator.example()
    models = (run.model.with_depth(depth.on_grid(steps, solver=solver)) for solver, steps in where.places)
    return [read(model, evaluator, example) for model in models]


def read_training(job: Job) -> Training:
    """The data that a finished training wrote, with the curve through all its stages."""
    curve, before, metrics = [], 0, []
    for stage in job.stages:
        metrics = read_metrics(stage.recipe.run.metrics)
        curve += [(before + r["step"] + 1, r["eval/loss"]) for r in metrics if "eval/loss" in r]
        before += stage.recipe.steps
    seconds = statistics.median(r["throughput/duration"] for r in metrics[1:] or metrics)
    return Training(job.seed, job.rate, curve, curve[-1][1], seconds)


def evaluator_on(run: Run, path: str, max_batches: int | None) -> RunEvaluator:
    """Evaluates models of a run on a text other than those of its training and validation."""
    return RunEvaluator(on_other_text(run, {"validation": path}), max_batches=max_batches)


def some_tokens(evaluator: RunEvaluator, sequences: int) -> NamedArray:
    """The first sequences of its text, {batch, position}."""
    tokens = evaluator.example().tokens.rearrange(("batch", "position"))
    return hax.named(tokens.array[:sequences], ("batch", "position"))


def untrained(model: LmHeadModel, *, key: jax.Array) -> LmHeadModel:
    """A model of the same configuration with newly initialised parameters."""
    return eqx.filter_jit(lambda key: model.config.build(model.Vocab, key=key))(key)


def causal_at(run: Run, name: str) -> list[int]:
    """The positions at which a run's model passed the causality test, on its validation text."""
    some = some_tokens(RunEvaluator(run, batch_size=_SEQUENCES, max_batches=1), _SEQUENCES)
    # With the mask of training; Levanter's own models have none otherwise.
    model = Partial(lambda model, tokens: model(tokens, attn_mask=AttentionMask.causal()), run.model)
    return check_causality(model, some, name)


def check_causality(model: Callable[[NamedArray], NamedArray], tokens: NamedArray, name: str) -> list[int]:
    """No result without causality: changing a token must leave all logits before it unchanged, bit for bit.

    Args:
        model: tokens {batch, position} -> logits {batch, position, vocab}.
        tokens: real text; the middle, second and last token of each sequence are changed, one at a time.
        name: of the model, for the message.

    Returns:
        the tested positions.

    Raises:
        UserError: a logit before the changed token changes at all, or none from it on does.
    """
    length = tokens.resolve_axis("position").size
    tried = sorted({1, length // 2, length - 1})
    for j in tried:
        before, after = moved(model, tokens, j)
        if not before == 0.0:  # also catches nan
            raise UserError(
                f"{name} sees the future: token {j} was changed, and logits before it moved by up to {before:.3g}. Its"
                " loss says nothing, and is not accepted"
            )
        if after == 0.0:
            raise UserError(
                f"{name} does not hear its input: token {j} was changed, and no logit moved. Its loss is not accepted"
            )
    return tried


def moved(model: Callable[[NamedArray], NamedArray], tokens: NamedArray, j: int) -> tuple[float, float]:
    """The largest change of a logit before token `j` if that token is changed, which is 0 in a causal model; and the
    largest change from it on."""
    plain = _logits_of(model, tokens)
    other = hax.named(tokens.array.at[:, j].set((tokens.array[:, j] + 1) % plain.shape[-1]), tokens.axes)
    change = np.abs(np.asarray(_logits_of(model, other)) - np.asarray(plain))
    return float(change[:, :j].max()), float(change[:, j:].max())


@eqx.filter_jit
def _logits_of(model: Callable[[NamedArray], NamedArray], tokens: NamedArray) -> jax.Array:
    return model(tokens).rearrange(("batch", "position", "vocab")).array
