"""Compares the cost of models: parameters, FLOPs, memory. From configurations (without allocating anything) or runs.

For example:

    qkvflow describe --config_path A.yaml [B.yaml ...] [--vocab_size N] [--model.depth.steps 24 ...]
    qkvflow describe --run DIR [DIR ...] [--checkpoint_step N]
    qkvflow describe --mesh 8x8 [--target v5e] --config_path A.yaml [--run DIR] [--json FILE]
    qkvflow describe --serve --target v5e [--slots 8] [--dtype bf16] --config_path A.yaml

Runs also show how much each weight varies with layer-time: sqrt(mean_t |W(t) - mean W|^2) / |mean W|.
`--mesh` also compiles the training step for that many virtual devices (data x model) and reports what each of them
needs; `--target` uses the compiler of that machine (v4, v5e, v5p, v6e; a100, h100, h200, b200; or `v5e:4x4`).
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import qkvflow as qkvflow  # registers the models
from qkvflow.cli import parse, run_program
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.config.yaml_file import read_yaml
from qkvflow.config.yaml_text import dump
from qkvflow.errors import UserError
from qkvflow.files import json_text, local_path
from qkvflow.generation.precision import dtype_by_name
from qkvflow.meshes import MeshReport, MeshShape, Target, describe_mesh
from qkvflow.meshes.compilers import compiler_environment
from qkvflow.meshes.fitting import Change, Trial, as_record, changes, told, try_changes
from qkvflow.meshes.report import as_dict, summary
from qkvflow.progress import Progress
from qkvflow.ranges import Count
from qkvflow.runs import load_run
from qkvflow.runs.config import FinetuneConfig, TrainConfig
from qkvflow.runs.directory import RunDirectory
from qkvflow.training.description import Sections, change_over_time, describe, table, vocabulary_size
from qkvflow.training.finetune import finetune_start
from qkvflow.training.start import Start, start_of

_SLOTS = 8


@dataclass
class DescribeConfig:
    """
    Attributes:
        files: configurations; `--config_path A.yaml B.yaml`.
        run: run directories.
        checkpoint_step: N of the runs' checkpoints `step-N`; the newest by default.
        vocab_size: vocabulary size for configurations; by default that of their tokenizer.
        overrides: `--key.subkey value` for every configuration.
        mesh: the devices to compile the training step for, see `qkvflow.meshes.shape`.
        target: the machine to compile for, see `qkvflow.meshes.target`; without `mesh`, its devices are arranged as
            `trainer.mesh` says.
        serve: compile a decoding step for one device of the target instead of the training step.
        slots: number of full-length texts to which a decoding step adds a token; 8 by default.
        dtype: precision of a decoding step, f32 or bf16; by default that of the weights.
        suggest: if a configuration does not fit the target, also compile changes that may make it fit.
        json: a file to which all results are also written.
    """

    files: list[str] = field(default_factory=list, metadata={"flag": "config_path"})
    run: list[str] = field(default_factory=list)
    checkpoint_step: int | None = None
    vocab_size: Count | None = None
    overrides: list[str] = field(default_factory=list, metadata={"flag": None})
    mesh: str | None = None
    target: str | None = None
    serve: bool = False
    slots: Count | None = None
    dtype: str | None = None
    suggest: bool = True
    json: str | None = None


def main(config: DescribeConfig) -> None:
    """Prints one table with a column for each configuration and each run.

    Raises:
        UserError: there is nothing to describe, a configuration or run cannot be read, or one of them cannot be
            compiled; the results of those before it are printed and written all the same.
    """
    if not config.files and not config.run:
        raise UserError("nothing to describe: give --config_path FILE [FILE ...] or --run DIR [DIR ...]")
    if config.run and config.overrides:
        raise UserError(f"{config.overrides[0]} changes configurations, but a run is described unchanged. Leave it out")
    shape, target = _machine(config)
    if target is not None:
        compiler_environment(target.chip.platform)  # refuses, if there is none
    if not config.serve and (config.slots is not None or config.dtype is not None):
        raise UserError("--slots and --dtype are for a decoding step: add --serve and a --target, or leave them out")
    if config.dtype is not None:
        dtype_by_name(config.dtype)
    if config.json is not None:
        _check_writable(local_path(config.json))
    with quiet_libraries() as quiet:
        progress = Progress(quiet.terminal)
        subjects = _subjects(config, shape)  # errors before long work
        found = _Found({subject.name: subject.column for subject in subjects})
        try:
            if shape is not None:
                for subject in subjects:
                    _compile(subject, config, shape, target, found, progress)
        except BaseException:
            if found.reports:  # which took minutes
                _tell(config, target, found)
            raise
        _tell(config, target, found)


@dataclass(frozen=True)
class _Subject:
    """A configuration or a run.

    Attributes:
        column: what its shapes say.
        path: the file of a configuration.
        run: the directory of a run.
    """

    name: str
    column: Sections
    train: TrainConfig
    vocab: int
    path: str | None = None
    run: RunDirectory | None = None


@dataclass(frozen=True)
class _Found:
    """The results, by name of the subject."""

    columns: dict[str, Sections]
    reports: dict[str, MeshReport] = field(default_factory=dict)
    trials: dict[str, list[Trial]] = field(default_factory=dict)


def _machine(config: DescribeConfig) -> tuple[MeshShape | None, Target | None]:
    """What to compile for, if anything."""
    shape = None if config.mesh is None else MeshShape.read(config.mesh)
    if config.serve and config.target is None:
        raise UserError("--serve compiles a decoding step for a machine: name it, for example --target v5e")
    if config.serve and shape is not None:
        raise UserError(f"--mesh {config.mesh}: a decoding step (--serve) is for one device. Leave --mesh out")
    if config.target is None:
        return shape, None
    if config.serve:
        target = Target.read_smallest(config.target)
    else:
        target = Target.read(config.target, None if shape is None else shape.devices)
    return MeshShape(target.devices) if shape is None else shape, target


def _subjects(config: DescribeConfig, shape: MeshShape | None) -> list[_Subject]:
    """Reads all configurations and runs."""
    if config.vocab_size is not None and not config.files:
        raise UserError("--vocab_size is for configurations: a run has its own vocabulary. Leave it out")
    if config.checkpoint_step is not None and not config.run:
        raise UserError("--checkpoint_step is for runs: configurations have no checkpoints. Leave it out")
    subjects = []
    short = {path: path.removesuffix(".yaml").removeprefix("configs/") for path in config.files}
    for path, (train, start) in [(path, _read(path, config.overrides)) for path in config.files]:
        vocab = config.vocab_size or vocabulary_size(train)
        name = short[path] if list(short.values()).count(short[path]) == 1 else path
        subjects.append(_Subject(name, describe(train, vocab, start), train, vocab, path))
    for path in config.run:
        run = load_run(path, config.checkpoint_step)
        train, start = start_of(run.directory)
        vocab = run.model.Vocab.size
        column = describe(train, vocab, start) | {"change of W(t) over t": change_over_time(run.model)}
        subjects.append(_Subject(f"{run.directory} step {run.step}", column, train, vocab, run=run.directory))
    if shape is not None:
        for subject in subjects:
            shape.applied(subject.train.trainer)  # refuses, if it has other axes
    return subjects


def _compile(
    subject: _Subject,
    config: DescribeConfig,
    shape: MeshShape,
    target: Target | None,
    found: _Found,
    progress: Progress,
) -> None:
    """Adds the report of the step of one configuration or run, and changes that may make it fit."""
    name, train = subject.name, subject.train
    slots = (config.slots or _SLOTS) if config.serve else None
    with progress.phase(f"Compiling {name} for {target or f'{shape.devices} devices'}"):
        size = None if config.vocab_size and subject.run is None else train.vocab_size
        sized = dataclasses.replace(train, vocab_size=size)
        report = describe_mesh(sized, subject.vocab, shape, subject.run, target, slots, config.dtype)
    found.reports[name] = report
    found.columns[name] |= report.sections()
    may_try = config.suggest and not config.serve and not report.fits_target
    if target is not None and subject.path is not None and may_try:
        made = partial(_changed, subject.path, config, subject.vocab, shape, target, progress)
        found.trials[name] = try_changes(changes(train, shape), made)


def _tell(config: DescribeConfig, target: Target | None, found: _Found) -> None:
    """Prints the results, and writes them where `json` says."""
    print(table(found.columns), flush=True)
    for name, report in found.reports.items():
        print("\n".join([f"\n{name}:", *report.notes()]) if report.notes() else "", flush=True)
    for name, tried in found.trials.items():
        print("\n".join([f"\n{name} does not fit {target}. Tried:", *told(tried)]), flush=True)
    if config.json is not None:
        _write(local_path(config.json), found)


def _read(path: str, overrides: list[str]) -> tuple[TrainConfig, Start | None]:
    """A configuration to train from scratch, or to fine-tune: that has a `mode`."""
    words = ["--config_path", path, *overrides]
    try:
        is_finetune = "mode" in read_yaml(Path(path))
    except UserError:
        is_finetune = False  # `parse` says what is wrong with the file
    return finetune_start(parse(FinetuneConfig, words)[0]) if is_finetune else (parse(TrainConfig, words)[0], None)


def _changed(
    path: str, config: DescribeConfig, vocab: int, shape: MeshShape, target: Target, progress: Progress, change: Change
) -> MeshReport:
    """The report of a configuration with a change."""
    words = list(change.words)
    if change.what == "mesh":
        shape, words = MeshShape.read(words[1]), []
    train, _ = _read(path, [*config.overrides, *words])
    with progress.phase(f"Trying {change}"):
        sized = dataclasses.replace(train, vocab_size=None if config.vocab_size else train.vocab_size)
        return describe_mesh(sized, vocab, shape, None, target)


def _write(path: Path, found: _Found) -> None:
    written: dict[str, dict] = {name: {"sections": sections} for name, sections in found.columns.items()}
    for name, report in found.reports.items():
        written[name]["mesh"] = as_dict(report)
        written[name] |= {} if report.target is None else summary(report)
    for name, tried in found.trials.items():
        written[name]["would_fit"] = as_record(tried)
    try:
        path.write_text(json_text(written, indent=1))
    except OSError as error:
        raise UserError(f"cannot write --json {path}: {error.strerror}") from None


def _check_writable(path: Path) -> None:
    """Before long work."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"cannot write --json {path}: {'it is a folder' if path.is_dir() else 'its folder is missing'}")
    is_new = not path.exists()
    try:
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise UserError(f"cannot write --json {path}: {error.strerror}") from None


def arguments(argv: Sequence[str]) -> list[str]:
    """The command line as `parse` reads it: lists of files and runs, and other keys as overrides of the files."""
    lists: dict[str, list[str]] = {"config_path": [], "run": [], "overrides": []}
    own, target = [], None
    for word in argv:
        key, equals, value = word.removeprefix("--").partition("=")
        if word in ("-h", "--help") or (
            word.startswith("--")
            and key in ("vocab_size", "checkpoint_step", "mesh", "target", "serve", "slots", "dtype", "suggest", "json")
        ):
            own.append(word)
            target = own
        elif word.startswith("--") and key in ("config_path", "run"):
            target = lists[key]
            target += [value] if equals else []
        elif word.startswith("--"):
            lists["overrides"].append(word)
            target = lists["overrides"]
        else:
            (own if target is None else target).append(word)
    pairs = {"files": lists["config_path"], "run": lists["run"], "overrides": lists["overrides"]}
    return [*own, *(w for key, words in pairs.items() if words for w in (f"--{key}", dump(words)))]


if __name__ == "__main__":
    run_program(main, DescribeConfig, arguments(sys.argv[1:]))
