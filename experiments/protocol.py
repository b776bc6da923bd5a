"""The rules of a study: the keys of its YAML; and with what was found by them, as data and in words, its protocol."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from experiments.counts import Counts, about, reached
from experiments.recipes import Changes, Recipe
from experiments.texts import Builtin, Text, TextConfig
from qkvflow.errors import UserError


@dataclass
class OutputConfig:
    """
    Attributes:
        run_dir: where the runs go. output: folder of the results, by default `<run_dir>/results`.
        config_path: the YAML file that this came from; its name is that of the run directory, `runs/<study>_<name>`.
        redraw: only tables and figures, from `results.json` in `output`.
    """

    run_dir: str | None = None
    output: str | None = None
    redraw: bool = False
    config_path: str | None = None

    def check(self) -> None:
        """Raises: UserError: for what cannot be studied, before any work."""

    def rules(self) -> dict[str, Any]:
        """All keys but those of places, which are of one machine."""
        places = ("run_dir", "output", "readings", "redraw", "config_path")
        return {key: value for key, value in vars(self).items() if key not in places}

    def runs(self, study: str) -> Path:
        """The folder of the runs of `study`."""
        name = "" if self.config_path is None else f"_{Path(self.config_path).stem}"
        return Path(self.run_dir or f"runs/{study}{name}")

    def results(self, runs: Path) -> Path:
        """The folder of the results: `output`, or one in the folder of the runs."""
        return Path(self.output) if self.output else runs / "results"


@dataclass
class SeedsConfig(OutputConfig):
    """Besides what `OutputConfig` says:

    Attributes:
        overrides: merged into the configuration of every model.
        seeds: of the trainings that are reported; a seed settles data order and initial weights.
        evaluations: how often the loss on `select` is read during a training; select_batches: of how many batches.
        report_batches: of how many batches of the part `report` the reported loss is; all if null.
        readings: folder of what was read off each finished training, a small file for each; by default
            `<run_dir>/readings`. With these files another machine goes on without the runs.
        note: what of the reported losses was known when this was planned; it stands on the page.
    """

    overrides: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [42, 123, 456, 789, 1011])
    evaluations: int = 20
    select_batches: int | None = None
    report_batches: int | None = None
    readings: str | None = None
    note: str = ""

    @property
    def n(self) -> int:
        """How many trainings of each kind are reported."""
        return len(self.seeds)

    @property
    def noted(self) -> str:
        """What of the reported losses was known when the study was planned."""
        return f" {self.note}" if self.note else ""

    @property
    def batches(self) -> dict[str, int | None]:
        """Of how many batches the parts are read whose losses are told; None: of all."""
        return {"select": self.select_batches, "report": self.report_batches}

    def check(self) -> None:
        if len(self.seeds) < 2 or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"`seeds` must be at least two different ones, for intervals and tests; got {self.seeds}")
        self.check_least(evaluations=1)

    def kept_in(self, runs: Path) -> Path:
        """The folder of the readings."""
        return Path(self.readings) if self.readings else runs / "readings"

    def recipe(self, file: str | None, text: Text, run_dir: Path, *changes: Changes) -> Recipe:
        """The configuration in a file, with `overrides` and then `changes` in it, on a text."""
        found = Recipe.of(file, self.overrides, *changes) if file else Recipe(self.overrides).but(*changes)
        return found.on(text, run_dir, self.select_batches, self.evaluations)

    def check_least(self, **least: int) -> None:
        """Raises: UserError: if a key, or a number in it, is below its least."""
        for name, bound in least.items():
            value = getattr(self, name)
            if min(value if isinstance(value, list) else [value], default=bound - 1) < bound:
                raise UserError(f"`{name}` must be at least {bound}, got {value}")


def check_among(key: str, names: Sequence[str], choices: Iterable[str]) -> None:
    """Raises: UserError: if some of `names` are none of `choices`, or there are no names."""
    unknown = [name for name in names if name not in choices]
    if unknown or not names:
        raise UserError(f"`{key}` has {', '.join(unknown) or 'nothing in it'}. Choices: {', '.join(choices)}")


def check_reference(key: str, reference: str, arms: Iterable[str], what: str, least: int = 2) -> None:
    """Raises: UserError: if the reference is none of the arms, or there are less than `least`."""
    arms = list(arms)
    names = ", ".join(arms) or "none"
    if reference not in arms:
        raise UserError(f"{key} is {reference!r}, which is not among {what} ({names})")
    if len(arms) < least:
        raise UserError(f"{key}: a comparison needs at least two arms, and it has {names}")


@dataclass
class StudyConfig(SeedsConfig):
    """Besides what `SeedsConfig` says:

    Attributes:
        text: `{type: wikitext2, folder: DIR}`, `{type: files, name, train, select, report}` or `{type: builtin}`.
        learning_rates: for each model the one with the lowest mean loss on the part `select` at the end of trainings
            with `selection_seeds` is taken; one alone is taken as it is. If empty, that of each configuration.
        selection_seeds: others than `seeds`.
    """

    text: TextConfig = field(default_factory=Builtin)
    learning_rates: list[float] = field(default_factory=list)
    selection_seeds: list[int] = field(default_factory=lambda: [0])

    def check(self) -> None:
        super().check()
        both = set(self.seeds) & set(self.selection_seeds)
        if len(self.learning_rates) > 1 and (both or not self.selection_seeds):
            raise UserError(
                f"`selection_seeds` must be others than `seeds`, at least one, but are {self.selection_seeds}: what is"
                " chosen by a training must not be reported of the same one"
            )


@dataclass(kw_only=True)
class Protocol:
    """What a protocol adds to the keys of a configuration: it is mixed into the class of that.

    Attributes:
        parts: what each part of the text is, in words; bytes: of each. counts: `select` or `report` -> what n-grams
            reach there that are counted in the first `counted` tokens of the part `train`, as many as a model is
            trained on.
    """

    text: str
    parts: dict[str, str]
    bytes: dict[str, int]
    tokenizer: str
    tokens_per_step: int
    counted: int
    counts: dict[str, Counts]

    @classmethod
    def of(cls, config: SeedsConfig, text: Text, recipe: Recipe, **more: Any) -> Self:
        """
        Args:
            recipe: one of the study's, for tokenizer and tokens; of the most steps if they differ.
            more: other fields of `cls`.
        """
        given = {"text": text.name, "parts": config.text.parts, "bytes": text.sizes(), "tokens_per_step": recipe.tokens}
        counted, counts = recipe.steps * recipe.tokens, reached(config.batches, recipe, text)
        known = {"tokenizer": recipe.config.data.tokenizer, "counted": counted, "counts": counts}
        return cls(**config.rules() | given | known | more)

    @property
    def about_text(self) -> str:
        parts = ", ".join(f"{part}: {words} ({self.bytes[part]:,} bytes)" for part, words in self.parts.items())
        return f"Text {self.text}: {parts}."

    @property
    def unit(self) -> str:
        """What a loss is of."""
        return "byte" if self.tokenizer == "byte" else f"{self.tokenizer.rpartition(':')[2]} token"

    def tokens_of(self, batches: int | None) -> str:
        """How much of a text is read, in words."""
        return f"first {batches * self.tokens_per_step:,} tokens, or fewer if it is shorter" if batches else ""

    @property
    def about_report(self) -> str:
        """How much of the part `report` is read."""
        first = self.tokens_of(self.report_batches)
        return f"its {first}" if first else "all of it"

    @property
    def about_seeds(self) -> str:
        return f"{self.n} seeds ({', '.join(map(str, self.seeds))})"

    @property
    def about_counts(self) -> str:
        words = f"counted in the first {self.counted:,} tokens of the training text, as many as a model is trained on"
        return f"n-grams, {words}, reach {about(self.counts['report'])} on the part `report`"

    def about_rates(self, each: str) -> str:
        """How the learning rates were found, for `each` what."""
        rates, seeds = ", ".join(f"{r:g}" for r in self.learning_rates), ", ".join(map(str, self.selection_seeds))
        if len(self.learning_rates) < 2:
            return rates or "that of each configuration, without a search"
        lowest = f"the lowest final loss on `select` with seeds {seeds}"
        return f"the one of {rates} with {lowest}, for {each}"
