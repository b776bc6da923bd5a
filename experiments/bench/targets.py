"""Compiles every configuration for its machines in configs/targets.yaml: `make targets` (hours).

python -m experiments.bench.targets [--only llama_1b] [--again]
python -m experiments.bench.targets --table     # prints results/targets.json

Each result is written to results/targets.json when it is done; existing results are not compiled again, except with
`--again`. This only needs this machine's CPU.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.bench.frame import RESULTS
from experiments.tables import Table
from qkvflow.cli import parse, run_program
from qkvflow.config import decode
from qkvflow.config.yaml_file import read_yaml
from qkvflow.errors import UserError, first_line
from qkvflow.files import write_text
from qkvflow.meshes import MeshShape, Target, describe_mesh
from qkvflow.meshes.report import summary
from qkvflow.runs.config import TrainConfig
from qkvflow.training.description import vocabulary_size
from qkvflow.units import in_bytes

CONFIGS = Path(__file__).parents[2] / "configs"
RECORD = RESULTS / "targets.json"


@dataclass(frozen=True)
class Machine:
    """
    Attributes:
        target, mesh: as for `describe`.
        options: further words of its command line.
    """

    target: str
    mesh: str | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Configurations, by path in configs/ without `.yaml`, and their machines."""

    configs: tuple[str, ...]
    machines: tuple[Machine, ...]


@dataclass(frozen=True)
class Plan:
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Job:
    """One compilation."""

    config: str
    machine: Machine

    @property
    def name(self) -> str:
        parts = [self.config, self.machine.target, self.machine.mesh or "", *self.machine.options]
        return " ".join(filter(None, parts))

    def run(self) -> dict[str, Any]:
        """The output of its `describe --json`."""
        words = ["--config_path", str(CONFIGS / f"{self.config}.yaml"), *self.machine.options]
        config = parse(TrainConfig, words)[0]
        shape = None if self.machine.mesh is None else MeshShape.read(self.machine.mesh)
        target = Target.read(self.machine.target, shape and shape.devices)
        report = describe_mesh(config, vocabulary_size(config), shape or MeshShape(target.devices), target=target)
        told = {"config": self.config, "mesh": self.machine.mesh, "options": list(self.machine.options)}
        batch = config.trainer.batch_schedule.batch_size_at_step(0)
        told |= {"tokens": batch * config.Pos.size, "compile_seconds": report.compile_seconds}
        largest = max((w.bytes for w in (*report.whole_arguments, *report.whole_temporaries)), default=0)
        return told | summary(report) | {"largest_whole_bytes": largest, "parameter_bytes": report.all_parameters}


@dataclass
class TargetsConfig:
    """
    Attributes:
        only: part of the name of a compilation: `llama_1b`, `v5e:8x8`, `openwebtext/small v5e:4x4`; all by default.
        again: also recompile existing results.
        table: print the results without compiling anything.
    """

    only: str = ""
    again: bool = False
    table: bool = False


def jobs() -> Iterator[Job]:
    """All jobs in configs/targets.yaml."""
    plan = decode(Plan, read_yaml(CONFIGS / "targets.yaml"))
    for group in plan.groups:
        for machine in group.machines:
            yield from (Job(name, machine) for name in group.configs)


def main(config: TargetsConfig) -> None:
    """Compiles the selected missing jobs, one after the other."""
    if config.table:
        print(page(read()))
        return
    chosen = [job for job in jobs() if config.only in job.name]
    if not chosen:
        raise UserError(f"--only {config.only}: no compilation has this in its name. They are named as in --table")
    for job in chosen:
        if job.name in read() and not config.again:
            continue
        print(f"{job.name} ...", flush=True)
        try:
            found: dict[str, Any] = job.run()
        except (UserError, RuntimeError) as error:  # the latter: of a compiler
            found = {"config": job.config, "target": job.machine.target, "error": first_line(error)}
        write(job.name, found)
        print(Table.of([line(job.name, found)]), flush=True)


def read() -> dict[str, dict[str, Any]]:
    """The results so far, by job name."""
    return json.loads(RECORD.read_text()) if RECORD.is_file() else {}


def write(name: str, found: dict[str, Any]) -> None:
    """Adds one result, in the order of the plan."""
    all_found = read() | {name: found}
    order = [job.name for job in jobs() if job.name in all_found]
    write_text(RECORD, json.dumps({name: all_found[name] for name in order}, indent=1) + "\n")


def page(found: dict[str, dict[str, Any]]) -> str:
    """The table of docs/scale.md, and what was not compiled."""
    missing = [job.name for job in jobs() if job.name not in found]
    text = str(Table.of([line(name, result) for name, result in found.items()]))
    return text + (f"\n\nNot compiled yet: {'; '.join(missing)}." if missing else "")


def line(name: str, found: dict[str, Any]) -> dict[str, str]:
    """A row."""
    if "error" in found:
        return {"configuration": found["config"], "machine": found["target"], "memory": found["error"]}
    where = " ".join(filter(None, [found["target"], found["mesh"] and f"({found['mesh']})", *found["options"]]))
    free = 1 - found["memory_bytes"] / found["chip_memory_bytes"]
    memory = f"{in_bytes(found['memory_bytes'])}, {f'{free:.0%} free' if found['fits'] else 'does not fit'}"
    row = {"configuration": found["config"], "machine": where, "attention": found["attention"] or "-", "memory": memory}
    if found["roofline_seconds"] is None:
        return row | dict.fromkeys(("TFLOP", "traffic", "collectives", "step at least", "MFU at most"), "-")
    bound = found["roofline"]["bound"]
    return row | {
        "TFLOP": f"{found['flops'] / 1e12:.3g}",
        "traffic": in_bytes(found["bytes_accessed"]),
        "collectives": in_bytes(found["collective_bytes"]),
        "step at least": f"{1000 * found['roofline_seconds']:.3g} ms ({bound})",
        "MFU at most": f"{found['mfu_bound']:.0%}",
    }


if __name__ == "__main__":
    run_program(main, TargetsConfig)
