"""The framework of all studies: plan, trainings, one record, tables and figures. README.md says how to add one."""

import contextlib
import functools
import json
import re
import string
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from experiments import style
from experiments.config import OutputConfig, SeedsConfig
from experiments.records import Record, made_here, read, written
from experiments.statistics import LEVEL
from experiments.tables import Table
from qkvflow.cli import run_program
from qkvflow.errors import UserError, first_line
from qkvflow.files import write_text

FOLDER = Path(__file__).parent
C = TypeVar("C", bound=OutputConfig)
R = TypeVar("R", bound=Record)
_USAGE = """
    python -m experiments.{name} --config FILE             (those of experiments/{name}/, or yours)
    python -m experiments.{name} --smoke                   (minutes; texts that ship with Python)
    python -m experiments.{name} --redraw --output FOLDER  (page, tables and figures, from its JSON)

Every training is a run below `run_dir`. Given again, the command continues where it stopped. Results go to `output`:
`results.json`, the page, tables and figures.
"""


@dataclass(frozen=True)
class Study(Generic[C, R]):
    """The definition of a study.

    Attributes:
        name: of its folder. config: class of its YAML. record: class of its `results.json`.
        make: carries it out in a folder for its runs. After an interruption it is called again, and continues.
        page: values for the placeholders of `page.md` besides `record`, its protocol `p` and the `level` of intervals;
            the page is written to `page_name`, and printed.
        files: CSV and LaTeX, by name. figures: by name.
    """

    name: str
    config: type[C]
    record: type[R]
    make: Callable[[C, Path], R]
    page: Callable[[R], Mapping[str, object]]
    files: Callable[[R], Mapping[str, str | Table]] = lambda record: {}
    figures: Callable[[R], Iterable[style.Named]] = lambda record: ()
    page_name: str = "results.md"

    def carry_out(self, config: C) -> R:
        """Makes the record, or continues to, and saves it as `results.json`; then draws everything from it.

        Raises:
            UserError: the configuration is invalid, a text is missing, runs in `run_dir` have other settings, a model
                fails the causality test, a folder is a file, or there is nothing to redraw.
        """
        runs = config.runs(self.name)
        output = config.results(runs)
        path = output / "results.json"
        for key, folder in config.folders(runs).items():
            _check_folder(folder, key)
        results = None
        if config.redraw:
            record = self._stored(path)
        else:
            config.check()
            results = written(made_here(self.make(config, runs), f"experiments.{self.name}"))
            record = read(self.record, json.loads(results))
        page, tables = self.filled_page(record), self.files(record)  # before earlier results are replaced
        output.mkdir(parents=True, exist_ok=True)
        if results is not None:
            write_text(path, results)
        for name, content in {**tables, self.page_name: page}.items():
            write_text(output / name, content.csv() if isinstance(content, Table) else content)
        style.save(self.figures(record), output)
        print(f"{page}\nWritten to {output}", flush=True)
        return record

    def _stored(self, path: Path) -> R:
        """The results to redraw."""
        if not path.is_file():
            raise UserError(
                f"there are no results in {path.parent}: run the experiment first, without --redraw, or name their"
                " folder by --output"
            )
        try:
            return read(self.record, json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise UserError(
                f"{path} is not the results of experiments.{self.name}, or a part of them ({first_line(error)}). Name"
                " their folder by --output, or run the experiment again, without --redraw"
            ) from None

    def filled_page(self, record: R) -> str:
        """`page.md` with its values."""
        values = {"record": record, "p": getattr(record, "protocol", None), "level": LEVEL, **self.page(record)}
        return filled(f"{self.name}/page.md", values)

    def program(self) -> NoReturn:
        """Runs the study as a program; its usage starts with the docstring of the module that has `make`."""
        if issubclass(self.config, SeedsConfig):
            module = sys.modules[self.make.__module__]
            module.__doc__ = f"{module.__doc__}{_USAGE.format(name=self.name)}"

        @functools.wraps(self.make)
        def main(config: C) -> None:
            self.carry_out(config)

        run_program(main, self.config, self.arguments(sys.argv[1:]))

    def arguments(self, argv: Sequence[str]) -> list[str]:
        """The command line to parse: `--smoke` stands for `--config` with the study's `smoke.yaml`."""
        first = ["--config", str(FOLDER / self.name / "smoke.yaml")] if "--smoke" in argv else []
        return [*first, *(word for word in argv if word != "--smoke")]


def _check_folder(path: Path, key: str) -> None:
    """Raises: UserError: the path, or one above it, is a file. key: of the configuration, for the message."""
    there = next(own for own in (path, *path.parents) if own.exists())
    if not there.is_dir():
        raise UserError(f"{there} is a file, so it cannot be, or hold, the folder `{key}`. Choose another by --{key}")


class _Missing(Exception):
    """A placeholder is None."""


class _Page(string.Formatter):
    def format_field(self, value: object, format_spec: str) -> str:
        if value is None:
            raise _Missing
        return "" if format_spec == "if" else super().format_field(value, format_spec)


def filled(template: str, values: Mapping[str, object]) -> str:
    """A template in this folder with its placeholders filled as by `str.format`.

    A line with a placeholder that is None is left out; `{name:if}` shows nothing, for lines that depend on it.
    """
    shown = []
    for line in (FOLDER / template).read_text(encoding="utf-8").split("\n"):
        with contextlib.suppress(_Missing):
            shown.append(_Page().vformat(line, (), values))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(shown)).rstrip("\n") + "\n"
