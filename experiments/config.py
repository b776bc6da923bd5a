"""The keys of a study's YAML: where its results go, its seeds, its text or two texts, its learning rates."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from experiments.counts import BEGINNING
from experiments.recipes import Changes, Recipe, value_at
from experiments.texts import Builtin, Text, TextConfig
from qkvflow.errors import UserError
from qkvflow.ranges import Count, Positive, Range


@dataclass
class OutputConfig:
    """
    Attributes:
        run_dir: folder of the runs.
        output: folder of the results, by default `<run_dir>/results`.
        config_path: the YAML file of this configuration; its name gives the run directory, `runs/<study>_<name>`.
        redraw: only write tables and figures, from `results.json` in `output`.
    """

    run_dir: str | None = None
    output: str | None = None
    redraw: bool = False
    config_path: str | None = None

    def check(self) -> None:
        """Raises: UserError: for settings that cannot work, before any work."""

    def rules(self) -> dict[str, Any]:
        """All keys except paths, which depend on the machine, and whether anything is trained."""
        places = ("run_dir", "output", "readings", "redraw", "partial", "config_path")
        return {key: value for key, value in vars(self).items() if key not in places}

    def runs(self, study: str) -> Path:
        """The folder of the runs of `study`."""
        name = "" if self.config_path is None else f"_{Path(self.config_path).stem}"
        return Path(self.run_dir or f"runs/{study}{name}")

    def results(self, runs: Path) -> Path:
        """The folder of the results: `output`, or one in the folder of the runs."""
        return Path(self.output) if self.output else runs / "results"

    def folders(self, runs: Path) -> dict[str, Path]:
        """key -> the folder that it names."""
        return {"run_dir": runs, "output": self.results(runs)}


@dataclass
class SeedsConfig(OutputConfig):
    """In addition to `OutputConfig`:

    Attributes:
        overrides: merged into the configuration of every model.
        seeds: of the reported trainings; a seed determines data order and initial weights.
        seeds_at_once: number of seeds of an arm that are trained together, as one program on one device; the same
            trainings up to rounding. For a GPU that one small training leaves idle.
        evaluations: number of evaluations of the loss on `select` per training.
        select_batches: number of batches in each of these evaluations.
        report_batches: number of batches of the part `report` for the reported loss; all if null.
        readings: folder of the measurements of each finished training, a small file for each; by default
            `<run_dir>/readings`. With these files another machine can continue without the runs.
        note: what was known about the reported losses when this was planned; shown on the page.
    """

    overrides: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [42, 123, 456, 789, 1011])
    seeds_at_once: Count = 1
    evaluations: Count = 20
    select_batches: Count | None = None
    report_batches: Count | None = None
    readings: str | None = None
    note: str = ""

    @property
    def n(self) -> int:
        """Number of reported trainings of each kind."""
        return len(self.seeds)

    @property
    def noted(self) -> str:
        """What was known about the reported losses when the study was planned."""
        return f" {self.note}" if self.note else ""

    @property
    def batches(self) -> dict[str, int | None]:
        """Number of batches for each part whose loss is reported; None: all."""
        return {"select": self.select_batches, "report": self.report_batches}

    def check(self) -> None:
        if self.config_path is None:
            raise UserError("nothing to study: give --config FILE, one of the YAML files beside the study, or --smoke")
        check_changes(self.overrides, "overrides.")
        if len(self.seeds) < 2 or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"`seeds` must be at least two different ones, for intervals and tests; got {self.seeds}")

    def kept_in(self, run_dir: Path) -> Path:
        """The folder of the measurements."""
        return Path(self.readings or run_dir / "readings")

    def folders(self, runs: Path) -> dict[str, Path]:
        return super().folders(runs) | {"readings": self.kept_in(runs)}

    def without_text(self, base: str | Changes | None, *changes: Changes) -> Recipe:
        """A configuration, or that in a file, with `overrides` and then `changes` merged into it.

        The key `base` of `changes` names another file to start from.

        Raises:
            UserError: the file does not exist, or cannot be read, or a change is of what a study sets itself.
        """
        for own in changes:
            check_changes(own)
        base = next((own["base"] for own in changes if own.get("base")), base)
        changes = tuple({key: value for key, value in own.items() if key != "base"} for own in changes)
        if base is None:
            raise UserError("a configuration to begin from is missing: name its file, as the study's smoke.yaml does")
        if not isinstance(base, str | Mapping):
            raise UserError(f"`base` is {base!r}: give the name of a YAML file")
        found = Recipe.of(base) if isinstance(base, str) else Recipe(base)
        return found.but(self.overrides, *changes)

    def on(self, recipe: Recipe, text: Text, run_dir: Path) -> Recipe:
        """The recipe on a text, evaluated as this study says.

        Raises:
            UserError: it is invalid.
        """
        return recipe.on(text, run_dir, self.select_batches, self.evaluations)

    def recipe(self, base: str | Changes | None, text: Text, run_dir: Path, *changes: Changes) -> Recipe:
        """`without_text`, on a text."""
        return self.on(self.without_text(base, *changes), text, run_dir)


@dataclass
class TwoTextsConfig(SeedsConfig):
    """In addition to `SeedsConfig`: a, b: the texts, each like `text` of `StudyConfig`."""

    a: TextConfig = field(default_factory=lambda: Builtin("topics"))
    b: TextConfig = field(default_factory=lambda: Builtin("library"))

    def check(self) -> None:
        super().check()
        if self.a.title == self.b.title:
            raise UserError(
                f"`a` and `b` must be two texts with different names, which are those of their folders, but both are"
                f" {self.a.title!r}. Name one of them by `{{type: files, name, train, select, report}}`"
            )

    def texts(self, folder: Path) -> list[Text]:
        return [self.a.prepare(folder), self.b.prepare(folder)]


@dataclass
class StudyConfig(SeedsConfig):
    """In addition to `SeedsConfig`:

    Attributes:
        text: `{type: wikitext2, folder: DIR}`, `{type: files, name, train, select, report}` or `{type: builtin}`.
    """

    text: TextConfig = field(default_factory=Builtin)


@dataclass
class RatesConfig(StudyConfig):
    """In addition to `StudyConfig`:

    Attributes:
        learning_rates: for each model, the rate with the lowest mean loss on the part `select` at the end of trainings
            with `selection_seeds` is used; a single rate is used as it is. If empty, that of each configuration.
        selection_seeds: distinct from `seeds`, and from each other.
        beyond_grid: maximum number of rates added to a grid with its best at an edge.
    """

    learning_rates: list[Positive] = field(default_factory=list)
    selection_seeds: list[int] = field(default_factory=lambda: [0])
    beyond_grid: Annotated[int, Range(at_least=0)] = 0

    def check(self) -> None:
        super().check()
        if len(set(self.learning_rates)) < len(self.learning_rates):
            raise UserError(f"`learning_rates` has a rate twice: {self.learning_rates}. Give each once")
        both, own = set(self.seeds) & set(self.selection_seeds), self.selection_seeds
        if len(self.learning_rates) > 1 and (both or not own or len(set(own)) < len(own)):
            raise UserError(
                f"`selection_seeds` must be others than `seeds`, at least one and each once, but are {own}: what is"
                " chosen by a training must not be reported of the same one"
            )

    def without_text(self, base: str | Changes | None, *changes: Changes) -> Recipe:
        """See `SeedsConfig.without_text`.

        Raises:
            UserError: also for a learning rate beside `learning_rates`, which would replace it.
        """
        for own in (self.overrides, *changes):
            if self.learning_rates and value_at(own, "optimizer.learning_rate") is not None:
                raise UserError(
                    "`optimizer.learning_rate` is given, but `learning_rates` determines the rate of each arm. Leave"
                    " one of them out"
                )
        return super().without_text(base, *changes)


@dataclass
class OtherDepthsConfig(RatesConfig):
    """In addition to `RatesConfig`, for a study that also evaluates flows at other depths and with other solvers:

    Attributes:
        read_batches: number of batches of the part `report` for these evaluations; null: `report_batches`.
    """

    read_batches: Count | None = None

    @property
    def batches(self) -> dict[str, int | None]:
        return super().batches | {BEGINNING: self.read_batches or self.report_batches}


# Keys of `trainer` that a study sets itself, and how.
_OF_STUDIES = {
    "id": "as names of its trainings",
    "seed": "by `seeds`",
    "max_eval_batches": "by `select_batches`",
    "steps_per_eval": "by `evaluations`",
}


def check_changes(changes: Changes, where: str = "") -> None:
    """Raises: UserError: for keys that a study would replace. where: before each key in the message."""

    def keys(section: str) -> set[str]:
        found = changes.get(section)
        return set(found) if isinstance(found, Mapping) else set()  # what is no section is refused where it is read

    if data := sorted(keys("data") - {"tokenizer"}):
        raise UserError(
            f"`{where}data` has {', '.join(data)}, but a study trains on its texts, and takes only `tokenizer` from"
            " there. Leave it out"
        )
    if trainer := sorted(keys("trainer") & _OF_STUDIES.keys()):
        raise UserError(
            f"`{where}trainer` has {', '.join(trainer)}, which a study sets itself"
            f" ({', '.join(_OF_STUDIES[key] for key in trainer)}). Leave it out"
        )


def check_among(key: str, names: Sequence[str], choices: Iterable[str]) -> None:
    """Raises: UserError: if some of `names` are not among `choices`, or there are no names."""
    unknown = [name for name in names if name not in choices]
    if unknown or not names:
        raise UserError(f"`{key}` has {', '.join(unknown) or 'nothing in it'}. Choices: {', '.join(choices)}")


def check_reference(key: str, reference: str, arms: Collection[str], what: str, least: int = 2) -> None:
    """Raises: UserError: if the reference is not one of the arms, or there are fewer than `least`."""
    names = ", ".join(arms) or "none"
    if reference not in arms:
        raise UserError(f"{key} is {reference!r}, which is not among {what} ({names})")
    if len(arms) < least:
        raise UserError(f"{key}: a comparison needs at least two arms, and it has {names}")
