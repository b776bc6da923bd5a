"""The frame of all studies: plan, trainings, one record, tables and figures. README.md says how to add one."""

import functools
import json
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from experiments import style
from experiments.records import Record, made_here, read, written
from experiments.statistics import LEVEL
from experiments.tables import Table
from experiments.texts import Builtin, TextConfig
from qkvflow.cli import run_program
from qkvflow.errors import UserError
from qkvflow.files import write_text

FOLDER = Path(__file__).parent


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

    def check(self) -> None:
        if len(self.seeds) < 2 or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"`seeds` must be at least two different ones, for intervals and tests; got {self.seeds}")
        self.check_least(evaluations=1)

    def kept_in(self, runs: Path) -> Path:
        """The folder of the readings."""
        return Path(self.readings) if self.readings else runs / "readings"

    def check_least(self, **least: int) -> None:
        """Raises: UserError: if a key, or a number in it, is below its least."""
        for name, bound in least.items():
            value = getattr(self, name)
            if min(value if isinstance(value, list) else [value], default=bound - 1) < bound:
                raise UserError(f"`{name}` must be at least {bound}, got {value}")


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


C = TypeVar("C", bound=OutputConfig)
R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Study(Generic[C, R]):
    """What makes a study one.

    Attributes:
        name: that of its folder. config: class of its YAML. record: class of its `results.json`.
        make: carries it out in a folder for its runs. It is called again after any interruption, and goes on.
        page: what stands in the holes of `page.md`; the page is written to `page_name`, and shown.
        files: CSV and LaTeX, by name. figures: by name. default: YAML file that is taken where none is named.
    """

    name: str
    config: type[C]
    record: type[R]
    make: Callable[[C, Path], R]
    page: Callable[[R], Mapping[str, Any]]
    files: Callable[[R], Mapping[str, str | Table]] = lambda record: {}
    figures: Callable[[R], Iterable[style.Named]] = lambda record: ()
    default: str | None = None
    page_name: str = "results.md"

    def carry_out(self, config: C) -> R:
        """Makes the record, or goes on making it, and keeps it as `results.json`; then draws everything from that.

        Raises:
            UserError: if the configuration cannot be, a text is missing, runs in `run_dir` were made with other
                settings, a model fails the test of causality, or there is nothing to redraw.
        """
        runs = config.runs(self.name)
        output = config.results(runs)
        path = output / "results.json"
        if not config.redraw:
            config.check()
            record = made_here(self.make(config, runs), f"experiments.{self.name}")
            output.mkdir(parents=True, exist_ok=True)
            write_text(path, written(record))
        if not path.is_file():
            raise UserError(
                f"there are no results in {output}: run the experiment first, without --redraw, or name their folder by"
                " --output"
            )
        record = read(self.record, json.loads(path.read_text()))
        page = self.filled_page(record)
        for name, content in {**self.files(record), self.page_name: page}.items():
            write_text(output / name, content.csv() if isinstance(content, Table) else content)
        style.save(self.figures(record), output)
        print(f"{page}\nWritten to {output}", flush=True)
        return record

    def filled_page(self, record: R) -> str:
        """`page.md`, its holes filled as `str.format` does it: by `page`, by `record`, and by `level` of intervals."""
        template = (FOLDER / self.name / "page.md").read_text(encoding="utf-8")
        return template.format(record=record, level=LEVEL, **self.page(record))

    def program(self) -> NoReturn:
        """Runs the study as a program; its usage is the docstring of the module that has `make`."""

        @functools.wraps(self.make)
        def main(config: C) -> None:
            self.carry_out(config)

        run_program(main, self.config, self.arguments(sys.argv[1:]))

    def arguments(self, argv: Sequence[str]) -> list[str]:
        """The command line as it is parsed: `--smoke` stands for `--config` with the study's `smoke.yaml`, and
        `--seeds 1,2,3` for `--seeds [1,2,3]`, as with every key that takes a list."""
        is_named = any(word.split("=")[0] in ("--config", "--config_path", "--help", "-h") for word in argv)
        file = "smoke.yaml" if "--smoke" in argv else None if is_named else self.default
        first = [] if file is None else ["--config", str(FOLDER / self.name / file)]
        lists = {f"--{key}" for key, hint in typing.get_type_hints(self.config).items() if _is_list(hint)}
        words = []
        for word in (word for word in argv if word != "--smoke"):
            words += word.split("=", 1) if word.split("=")[0] in lists else [word]
        for place, key in enumerate(words[:-1]):
            value = words[place + 1]
            if key in lists and value != "null" and not value.startswith(("[", "@", "--")):
                words[place + 1] = f"[{value}]"
        return [*first, *words]


def _is_list(hint: Any) -> bool:
    """Whether a key may be a list; not whether it holds some."""
    is_choice = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return list in map(typing.get_origin, typing.get_args(hint) if is_choice else (hint,))
