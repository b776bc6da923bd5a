"""The plan of the comparison: its YAML, and its systems in the sizes and lengths that the rows require."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from experiments.alike import check_alike
from experiments.config import check_among, check_reference
from experiments.cost import Cost, cost_of, width_with
from experiments.jobs import Arm
from experiments.recipes import Recipe, value_at
from experiments.search import SearchConfig
from experiments.texts import Text
from qkvflow.errors import UserError
from qkvflow.ranges import Count, Positive, Range

# A row of equal FLOPs has no separate training if that would change the number of steps by a smaller fraction.
SAME_FLOPS = 0.05
ROWS = {
    "iso_step": "the same number of steps",
    "iso_flop": "nearly the same number of FLOPs",
    "iso_parameter": "nearly the same number of trained parameters",
}
TIME, WIDTHS = "iso_time", "widths"  # TIME is read from the trainings of the first row


@dataclass(frozen=True)
class CheckRates:
    """The check of transferred rates: trainings at the width of the comparison with the first selection seed.

    arms: that are checked. factors: of the transferred rate. corrects: before anything is reported, the grid grows like
    that of the search, and if a rate is better than the transferred one by more than `margin` on `select`, the rates of
    the system, but for that of the search, are multiplied by its factor. Otherwise nothing is chosen by it.
    """

    arms: list[str]
    factors: list[float] = field(default_factory=lambda: [0.5, 1.0, 2.0])
    corrects: bool = False


@dataclass(frozen=True)
class Published:
    """losses: system -> a published number. about: where it is from, and how it differs, in words."""

    losses: dict[str, float]
    about: str


@dataclass
class CompareConfig(SearchConfig):
    """In addition to `SearchConfig`; a learning rate is selected for each system in each size, or transferred:

    Attributes:
        systems: name -> configuration of train_lm; its data is replaced by `text`.
        arms: name -> changes merged into `base`; the key `base` selects another file to start from. More systems.
        base: configuration that `arms` start from.
        reference: the system with which the others are compared, also in FLOPs and parameters.
        rows: of ROWS; and `iso_time`, the losses when the reference's time is over, which needs no other trainings.
        targets: losses on `select`; time and FLOPs until each is first reached are reported.
        contrasts: pairs (system, reference): the one family of tests, at equal steps. Without, each row is a family
            against `reference`.
        margin: differences within it, in nats, count as equivalent.
        more_seeds: further seeds for the systems of contrasts whose interval straddles the margin after `seeds`.
        widths: values of `hidden_dim`, that of the reference among them, in which all systems are trained.
        check_rates: trainings that check whether transferred rates are near the best, and may correct them.
        ngrams: length of the n-grams that each system has to beat; null: no verdict.
        published: numbers to show beside.
        only: systems whose trainings are made now; those of others are read from `readings` if they are there.
        partial: make no trainings, and show those in `readings`.
        clock: like `partial`, but first time the steps of all systems side by side, with nothing else on the machine.
            These times replace those of the trainings. They are kept in `readings` (costs/times-*.json; remove it to
            measure again).
    """

    systems: dict[str, str] = field(default_factory=dict)
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    base: str | None = None
    reference: str = "standard"
    rows: list[str] = field(default_factory=lambda: list(ROWS))
    targets: list[float] = field(default_factory=list)
    contrasts: list[tuple[str, str]] = field(default_factory=list)
    margin: Positive = 0.02
    more_seeds: list[int] = field(default_factory=list)
    widths: list[Count] = field(default_factory=list)
    check_rates: CheckRates | None = None
    ngrams: Annotated[int, Range(at_least=2, at_most=5)] | None = None
    published: Published | None = None
    only: list[str] | None = None
    partial: bool = False
    clock: bool = False

    @property
    def corrects(self) -> bool:
        """Whether rates are corrected where their check fails."""
        return self.check_rates is not None and self.check_rates.corrects

    @property
    def names(self) -> list[str]:
        """All systems, the reference first."""
        return list(dict.fromkeys([self.reference, *self.systems, *self.arms]))

    def trains(self, system: str) -> bool:
        """Whether its trainings are made now."""
        return not self.partial and not self.clock and (self.only is None or system in self.only)

    def check(self) -> None:
        super().check()
        known = [*self.systems, *self.arms]
        check_reference("`reference`", self.reference, known, "`systems` and `arms`", least=1)
        check_among("rows", self.rows, [*ROWS, TIME])
        named = {"contrasts": [name for pair in self.contrasts for name in pair], "only": self.only}
        named |= {"check_rates.arms": self.check_rates.arms if self.check_rates else None}
        named |= {"published.losses": list(self.published.losses) if self.published else None}
        for key, names in named.items():
            if names:
                check_among(key, names, known)
        self._check_keys(known)

    def _check_keys(self, known: list[str]) -> None:
        twice = [name for name in known if known.count(name) > 1]
        same = [pair for pair in self.contrasts if pair[0] == pair[1] or self.contrasts.count(pair) > 1]
        first = [key for key in ("contrasts", "widths", "check_rates", "ngrams") if getattr(self, key)]
        of_seeds = set(self.more_seeds) & {*self.seeds, *self.selection_seeds}
        problems = {
            f"`widths` has a width twice: {self.widths}. Give each once": len(set(self.widths)) < len(self.widths),
            f"`arms` and `systems` share the name {', '.join(twice[:1])}: rename one": twice,
            f"`contrasts` has {same[:1]}, which is no pair of two systems, or there twice: remove it": same,
            "`more_seeds` is for systems of `contrasts`, which are missing: name them, or leave it out": (
                self.more_seeds and not self.contrasts
            ),
            f"`more_seeds` must be others than `seeds` and `selection_seeds`, but has {sorted(of_seeds)}": of_seeds,
            f"`more_seeds` has a seed twice: {self.more_seeds}. Give each once": len(set(self.more_seeds))
            < len(self.more_seeds),
            f"`rows` is {self.rows}: {TIME} is read from trainings with equal steps, so add iso_step": (
                TIME in self.rows and "iso_step" not in self.rows
            ),
            f"`{', '.join(first)}`: of trainings with equal steps, so `rows` must have iso_step": (
                first and "iso_step" not in self.rows
            ),
            f"`check_rates.factors` must be positive, 1 and others, each once, to see on which side of the transferred"
            f" rate the best is; got {self.check_rates and self.check_rates.factors}": (
                self.check_rates and not _are_around_one(self.check_rates.factors)
            ),
            "`clock` times all systems side by side: leave out `only`": self.clock and self.only,
            f"`clock` times the systems at equal steps, so `rows` must have iso_step, and is {self.rows}": (
                self.clock and "iso_step" not in self.rows
            ),
            "`check_rates` checks rates that were transferred: set `search_width`": (
                self.check_rates and self.search_width is None
            ),
        }
        for message, is_wrong in problems.items():
            if is_wrong:
                raise UserError(message)


@dataclass(frozen=True)
class Variant:
    """A system in one size, trained for one number of steps. rows: the rows that contain it."""

    system: str
    rows: list[str]
    width: int
    steps: int


def arms(config: CompareConfig, text: Text, run_dir: Path) -> list[Arm]:
    """All variants, the reference first; the same model with the same number of steps occurs once.

    Raises:
        UserError: a configuration cannot be read, the costs of a model are unknown, its tokens are not those of the
            reference, `widths` lacks its width, or a rate is to be corrected that is that of the search.
    """
    given = recipes(config, text, run_dir)
    check_alike(given, config.reference)
    _check_corrected(config, given)
    reference = given[config.reference]
    cost, found, sizes = cost_of(reference), {}, {_width(recipe) for recipe in given.values()}
    if config.widths and not sizes <= set(config.widths):
        raise UserError(f"`widths` is {config.widths}, but must have the width of all systems, {sorted(sizes)}: add it")
    for row in [*(row for row in config.rows if row in ROWS), *config.widths]:
        for name, recipe in given.items():
            own = _equal(row, recipe, reference.steps, cost)
            arm = _arm(name, own.evaluated(config.evaluations), text)
            found.setdefault(arm.label, arm).what.rows.append(row if row in ROWS else WIDTHS)
    return list(found.values())


def narrow(config: CompareConfig, text: Text, run_dir: Path) -> list[Arm]:
    """The systems in the width of the search."""
    given = recipes(config, text, run_dir)
    size = {"model": {"hidden_dim": config.search_width}}
    size |= {"trainer": {"num_train_steps": given[config.reference].steps}}
    return [_arm(name, own.but(size).evaluated(config.evaluations), text) for name, own in given.items()]


def recipes(config: CompareConfig, text: Text, run_dir: Path) -> dict[str, Recipe]:
    """Those of all systems, the reference first."""
    found = {}
    for name in config.names:
        changes = {} if name in config.systems else config.arms[name]
        try:
            if value_at(changes, "trainer.num_train_steps") is not None:
                raise UserError(
                    "`trainer.num_train_steps` is given, but the rows determine it, from that of the reference. Set it"
                    " for all, in `overrides`"
                )
            own = config.without_text(config.systems.get(name) or config.base, changes)
            if "mode" in own.raw:
                raise UserError("it is a fine-tune (it has a `mode`): compare what train_lm trains from its beginning")
            found[name] = config.on(own, text, run_dir)
        except UserError as error:
            raise UserError(f"{'systems' if name in config.systems else 'arms'}.{name}: {error}") from None
    return found


def _check_corrected(config: CompareConfig, given: Mapping[str, Recipe]) -> None:
    """Raises: UserError: the rate of a system would be corrected at the width of the search, where it is not
    transferred but the best of the search, and stays.
    """
    own = config.check_rates.arms if config.check_rates and config.corrects else []
    searched = [name for name in own if _width(given[name]) == config.search_width]
    if searched:
        raise UserError(
            f"`check_rates` corrects transferred rates, but the width of {', '.join(searched)} is `search_width`,"
            f" {config.search_width}: its rate is that of the search. Leave it out of `check_rates.arms`, or search at"
            " another width"
        )


def _arm(name: str, recipe: Recipe, text: Text) -> Arm:
    width = _width(recipe)
    what, group = Variant(name, [], width, recipe.steps), (name, width)
    label = f"{name}-d{width}-s{recipe.steps}"
    return Arm(label=label, recipe=recipe, cost=cost_of(recipe), what=what, text=text, shares_rate=group)


def _equal(row: str | int, recipe: Recipe, steps: int, reference: Cost) -> Recipe:
    """Changed to have as many steps, FLOPs or parameters as the reference, or this width and as many steps."""
    if isinstance(row, int):
        recipe = recipe.but({"model": {"hidden_dim": row}})
    elif row == "iso_parameter":
        recipe = recipe.but({"model": {"hidden_dim": width_with(recipe, reference.parameters)}})
    elif row == "iso_flop":
        share = reference.flops / cost_of(recipe).flops
        steps = steps if abs(share - 1) < SAME_FLOPS else max(1, round(steps * share))
    return recipe.but({"trainer": {"num_train_steps": steps}})


def _width(recipe: Recipe) -> int:
    return recipe.raw["model"]["hidden_dim"]


def _are_around_one(factors: list[float]) -> bool:
    return 1.0 in factors and len(set(factors)) == len(factors) > 1 and min(factors) > 0
