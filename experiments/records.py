"""Records: the results of a study, as dataclasses. They are written to JSON, and read from it once, typed."""

import contextlib
import dataclasses
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import jax
from pydantic import TypeAdapter

from qkvflow.files import write_text

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """cores: those available to the process."""

    device: str
    cores: int
    jax: str

    def __str__(self) -> str:
        return f"{self.device}, {self.cores} core{'' if self.cores == 1 else 's'}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The part of `results.json` common to all studies: the origin of the results. Older files lack it."""

    machine: Machine | None = None
    date: str = ""
    command: str = ""

    @property
    def origin(self) -> str | None:
        """Machine, date and command, in words; None if unknown."""
        return self.machine and f"{self.machine}, JAX {self.machine.jax}, {self.date}. Command: `{self.command}`"

    def of(self, **keys: object) -> list[Any]:
        """The trainings among its `results` with these values."""
        return [r for r in self.results if all(getattr(r, key) == value for key, value in keys.items())]


@dataclass(frozen=True)
class Training:
    """Measurements of any training. Studies add a description of their trainings, and other measurements.

    Attributes:
        curve: [steps done, loss on the part `select`]; select_loss: its last value; None if the training diverged.
        seconds_per_step: the median, without the run's first step if it has more.
        causal_at: the positions at which it passed the causality test. report_loss: on the part `report`. Both are
            measured for reported trainings.
    """

    seed: int
    learning_rate: float | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)
    select_loss: float | None = None
    seconds_per_step: float = 0.0
    causal_at: list[int] = field(default_factory=list)
    report_loss: float | None = None

    def reaches(self, loss: float) -> int | None:
        """The number of steps after which the loss on the part `select` first reaches `loss`; None if never."""
        return next((step for step, own in self.curve if own <= loss), None)


def by_seed(trainings: Iterable[Training], value: Callable[[Any], float] = lambda r: r.report_loss) -> dict[int, float]:
    """seed -> value."""
    return {training.seed: value(training) for training in trainings}


def six_digits(x: float) -> float:
    """For series, which make up most of a JSON file."""
    return float(f"{x:.6g}")


def device_name() -> str:
    """The kind of the accelerator, or the processor: with its architecture alone, fast and slow ones look the same."""
    device = jax.devices()[0]
    return device.device_kind if device.platform != "cpu" else processor()


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Its name, family and model, as Linux has them; elsewhere its architecture. Virtual machines often hide the rest
    of the name, as in `AMD EPYC`, but not the numbers."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    keys = ("model name", "cpu family", "model")
    found = [match[1].strip() for key in keys if (match := re.search(rf"^{key}\s*:(.*)$", text, re.MULTILINE))]
    return f"{found[0]} (family {found[1]}, model {found[2]})" if len(found) == len(keys) else platform.machine()


def this_machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Machine(device_name(), cores, jax.__version__)


def made_here(record: T, module: str) -> T:
    """The record, with this machine, today's date, and the running command."""
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    where = {"machine": this_machine(), "date": date.today().isoformat(), "command": command}
    return dataclasses.replace(record, **where)


def written(record: object) -> str:
    """JSON with one line per training."""
    parts = []
    for key, value in TypeAdapter(type(record)).dump_python(record).items():
        is_lines = isinstance(value, list) and value and isinstance(value[0], dict)
        text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if is_lines else json.dumps(value, indent=1)
        parts.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read(cls: type[T], raw: object) -> T:
    """The result of `json.loads` as `cls`. Keys that `cls` does not have are ignored: a file may be older."""
    return TypeAdapter(cls).validate_python(raw)


def kept(path: Path, cls: type[T], asked: object, make: Callable[[], T]) -> T:
    """The result of `make` when it last ran for `asked`, from the JSON at `path`; computed again if `asked` differs."""
    found = stored(path, cls, asked)
    if found is None:
        text = json.dumps({"asked": asked, "found": TypeAdapter(cls).dump_python(make())})
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text + "\n")
        found = read(cls, json.loads(text)["found"])
    return found


def asked_of(path: Path) -> dict[str, Any]:
    """What the stored value of `kept` was made for; empty if there is none."""
    return _content(path).get("asked", {})


def stored(path: Path, cls: type[T], asked: object) -> T | None:
    """The stored value of `kept`; None if there is none, or it is for another `asked`."""
    content = _content(path)
    if "asked" in content and content["asked"] == json.loads(json.dumps(asked)):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # something else
            return read(cls, content["found"])
    return None


def _content(path: Path) -> dict[str, Any]:
    """Of a file that `kept` wrote; empty if there is none, or it is something else."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    return {}
