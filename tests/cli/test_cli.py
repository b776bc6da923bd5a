"""Laws of the command line: what is read, and that every mistake is answered by one message that helps."""

import dataclasses
import gc
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import draccus
import jmp
import pytest
import yaml

from qkvflow.cli import parse
from qkvflow.config import Text, decode, encode
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.interrupts import imports_begin, imports_end
from qkvflow.runs.config import RunTrainerConfig, TrainConfig

GPT2 = {"type": "gpt2", "hidden_dim": 32, "num_heads": 2, "num_layers": 2, "max_seq_len": 16}


@dataclass(frozen=True)
class Inner:
    size: int = 3
    names: list[str] = field(default_factory=list)
    mode: Literal["fast", "slow"] = "fast"
    rate: float | int | None = None

    def __post_init__(self):
        if self.size < 0:
            raise UserError("size must not be negative")


@dataclass(frozen=True)
class Span:
    least: int
    most: int = 3


@dataclass(frozen=True)
class Stages:
    stages: dict[str, int]


@dataclass
class Outer:
    needed: int
    inner: Inner = field(default_factory=Inner)
    table: dict[str, Inner] = field(default_factory=dict)
    either: bool | Inner = False
    record: int | Span | Stages = 1
    path: Path = Path("x")
    wait: timedelta = timedelta(minutes=1)
    text: str = ""
    config_path: str | None = None


def _file(folder: Path, content: str) -> str:
    path = folder / "some.yaml"
    path.write_text(content)
    return str(path)


def test_flags_override_the_file_at_any_depth(tmp_path):
    path = _file(tmp_path, "needed: 1\ninner: {size: 4, names: [a]}\n")
    flags = [
        "--inner.size",
        "5",
        "--inner.rate=1e-3",
        "--table.k.size",
        "-0",
        "--text",
        "a: b: c",
        "--wait",
        "2h",
    ]
    config, raw = parse(Outer, ["--config_path", path, *flags])
    assert config == Outer(
        1,
        Inner(5, ["a"], rate=1e-3),
        {"k": Inner(0)},
        wait=timedelta(hours=2),
        text="a: b: c",
        config_path=path,
    )
    assert raw["inner"] == {"size": 5, "names": ["a"], "rate": 1e-3}


def test_a_flag_changes_one_place_of_what_an_anchor_brings_in(tmp_path):
    path = _file(tmp_path, "needed: 1\ntable: {a: &a {size: 1, names: [x]}, b: *a, c: {<<: *a, size: 2}}\n")
    config, _ = parse(Outer, ["--config_path", path, "--table.b.size", "5", "--table.c.names", "[y]"])
    assert config.table == {"a": Inner(1, ["x"]), "b": Inner(5, ["x"]), "c": Inner(2, ["y"])}


def test_home_is_known_behind_an_equals_sign(tmp_path, monkeypatch):
    _file(tmp_path, "needed: 3\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse(Outer, ["--config_path=~/some.yaml"])[0].needed == 3
    (tmp_path / "inner.yaml").write_text("size: 7")
    assert parse(Outer, ["--needed", "1", "--inner=@~/inner.yaml"])[0].inner.size == 7


@pytest.mark.parametrize(
    ("value", "names"),
    [("*.txt", ["*.txt"]), ("my #1.txt", ["my #1.txt"]), ("*.txt, b", ["*.txt", "b"])],
)
def test_words_that_are_no_yaml_in_brackets_are_items(value, names):
    assert parse(Outer, ["--needed", "1", "--inner.names", value])[0].inner.names == names


@pytest.mark.parametrize("value", ["[a, b]", "['a', 'b']", "a,b", "a, b"])
def test_flags_take_lists(value):
    assert parse(Outer, ["--needed", "1", "--inner.names", value])[0].inner.names == ["a", "b"]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"needed": 1, "iner": {}}, ["`iner`", "did you mean `inner`", "table"]),
        ({"needed": 1, "inner": {"siz": 1}}, ["`inner.siz`", "did you mean `inner.size`", "names"]),
        ({"needed": 1, "table": {"k": {"x": 1}}}, ["`table.k.x`", "size"]),
        ({"needed": 1, "either": {"x": 1}}, ["`either.x`", "size"]),
        ({"needed": "x"}, ["`needed`", "an integer", "'x'"]),
        ({"needed": 1.5}, ["`needed`", "an integer", "1.5"]),
        ({"needed": True}, ["`needed`", "an integer", "True"]),
        ({"needed": None}, ["`needed`", "empty"]),
        ({"needed": 1, "inner": {"names": "abc"}}, ["`inner.names`", "a list", "'abc'"]),
        ({"needed": 1, "inner": {"names": [[]]}}, ["`inner.names[0]`", "text"]),
        ({"needed": 1, "inner": {"rate": "fast"}}, ["`inner.rate`", "a number or an integer", "'fast'"]),
        ({"needed": 1, "inner": {"mode": "slwo"}}, ["`inner.mode`", "did you mean `slow`", "fast, slow"]),
        ({"needed": 1, "inner": {"size": -1}}, ["`inner`", "size must not be negative"]),
        ({"needed": 1, "inner": 7}, ["`inner`", "a mapping", "7"]),
        (
            {"needed": 1, "record": {"least": 1, "mst": 2}},
            ["`record.mst`", "mean `record.most`", "least, most"],
        ),
        ({"needed": 1, "record": {"most": 2}}, ["`record.least`", "missing"]),
        ({"needed": 1, "record": {"stages": "x"}}, ["`record.stages`", "a mapping"]),
        ({"needed": 1, "record": {"stgaes": {}}}, ["`record.stgaes`", "did you mean `record.stages`"]),
        (
            {"needed": 1, "record": {"x": 1}},
            ["`record`", "an integer or a mapping of least, most or"],
        ),
        ({"needed": 1, "wait": "soon"}, ["`wait`", "a time span", "'soon'"]),
        ({}, ["`needed`", "missing", "--config_path"]),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_the_possibilities(raw, words):
    with pytest.raises(UserError) as error:
        decode(Outer, raw)
    assert not [word for word in words if word not in str(error.value)], str(error.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.type", "gpt3"], ["`model.type`", "did you mean `gpt2`", "llama", "neuralode"]),
        (["--model.hiden_dim", "3"], ["`model.hiden_dim`", "`model.hidden_dim`", "num_layers"]),
        (["--trainer.num_train_step", "3"], ["`trainer.num_train_steps`"]),
        (["--trainer.mp", "f7"], ["`trainer.mp`", "a precision"]),
        (["--optimizer.type", "adm"], ["`optimizer.type`", "did you mean `adam`", "lion"]),
        (["--trainer.tracker", "[{type: wanb}]"], ["`trainer.tracker[0].type`", "wandb"]),
    ],
)
def test_wrong_keys_of_a_training_configuration(flags, words):
    with pytest.raises(UserError) as error:
        parse(TrainConfig, ["--model", str(GPT2), *flags])
    assert not [word for word in words if word not in str(error.value)], str(error.value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--needed"], ["--needed needs a value"]),
        (["--needed", "--text", "x"], ["--needed needs a value"]),
        (["needed", "3"], ["`needed`", "--key value"]),
        (["--config_path", "a.yaml", "--config_path", "b.yaml"], ["twice"]),
        (["--needed", "1", "--needed.x", "1"], ["`needed`", "no keys below"]),
        (["--inner..x", "1"], ["not a key"]),
        (["--needed", "1", "--inner", "{a: "], ["--inner", "not valid YAML"]),
    ],
)
def test_malformed_command_lines(argv, words):
    with pytest.raises(UserError) as error:
        parse(Outer, argv)
    assert not [word for word in words if word not in str(error.value)], str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: 1\n b: 2\n", ["line 2, column 3"]),
        ("a: 1\nb: 2\na: 3\n", ["`a` appears twice", "line 3"]),
        ("- a\n", ["key: value", "list"]),
        ("!!python/object/apply:os.system ['true']\n", ["not valid YAML"]),
    ],
)
def test_bad_yaml_names_the_place(tmp_path, content, words):
    with pytest.raises(UserError) as error:
        parse(Outer, ["--config_path", _file(tmp_path, content)])
    assert not [word for word in words if word not in str(error.value)], str(error.value)


def test_a_missing_file_lists_near_names(tmp_path):
    _file(tmp_path, "")
    with pytest.raises(UserError, match=r"some\.yaml"):
        parse(Outer, ["--config_path", str(tmp_path / "soem.yaml")])
    with pytest.raises(UserError, match="is a directory"):
        parse(Outer, ["--config_path", str(tmp_path)])


@pytest.mark.parametrize("model", [GPT2, {**GPT2, "type": "llama", "num_kv_heads": 1}, {"type": "neuralode"}])
def test_encoding_and_decoding_are_inverse(model):
    trainer = {
        "mp": "p=f32,c=bf16",
        "checkpointer": {"save_interval": "90s", "keep": [{"every": 5}]},
        "log_dir": "somewhere",
        "tracker": [{"type": "noop"}, {"type": "wandb", "mode": "offline"}],
        "train_batch_size": [{"start": 0, "value": 4}, {"start": 10, "value": 8}],
        "mesh": {"axes": {"data": -1}, "param_mapping": {"vocab": ["data", "model"]}},
    }
    config = decode(TrainConfig, {"model": model, "trainer": trainer, "optimizer": {"type": "lion"}})
    assert config.trainer.mp == jmp.get_policy("p=f32,c=bf16")
    assert decode(TrainConfig, yaml.safe_load(yaml.safe_dump(encode(config)))) == config


def test_decoding_agrees_with_draccus():
    raw = {
        "num_train_steps": 7,
        "mp": "bf16",
        "mesh": {"axes": {"data": 2}},
        "watch": {"watch_targets": ["grads"]},
    }
    ours, theirs = decode(RunTrainerConfig, raw), draccus.decode(RunTrainerConfig, raw)
    for field_ in dataclasses.fields(RunTrainerConfig):
        assert getattr(ours, field_.name) == getattr(theirs, field_.name)


PROGRAM = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that Ctrl-C is ignored
from dataclasses import dataclass
from qkvflow.cli.program import run_program
from qkvflow.cli.quiet import quiet_libraries
from qkvflow.errors import UserError

@dataclass
class Config:
    what: str = "end"

def main(config):
    if config.what == "end":
        threading.Thread(target=lambda: (time.sleep(0.2), print("written late"))).start()
    elif config.what == "user":
        raise UserError("a clear message")
    elif config.what == "fault":
        raise RuntimeError("a fault")
    elif config.what == "memory":
        bytes(1 << 62)
    elif config.what == "xla":
        import jax.numpy
        jax.numpy.zeros(1 << 50)
    elif config.what == "disk":
        raise ValueError("RESOURCE_EXHAUSTED: write failed [OS error 28: No space left on device]")
    elif config.what == "print":
        print("a reading")
    elif config.what == "exit":
        raise SystemExit(5)
    elif config.what == "write":
        with quiet_libraries() as quiet:
            os.write(2, b"a line of a library")
            while True:
                print("text", flush=True)
    elif config.what == "pipe":
        raise BrokenPipeError("of somebody else")
    elif config.what == "wait":
        print("ready", flush=True)
        time.sleep(60)

run_program(main, Config)
"""


def _program(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", PROGRAM, *flags], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("what", "status", "stdout", "stderr"),
    [
        ("end", 0, "written late\n", ""),
        ("user", 2, "", "error: a clear message\n"),
        ("exit", 5, "", ""),
    ],
)
def test_programs_end_with_a_status_and_one_message(what, status, stdout, stderr):
    done = _program("--what", what)
    assert (done.returncode, done.stdout, done.stderr) == (status, stdout, stderr)


def test_a_fault_keeps_its_traceback():
    done = _program("--what", "fault")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "RuntimeError: a fault" in done.stderr


@pytest.mark.parametrize("flags", [("--what", "print"), ("--help",)])
def test_output_that_cannot_be_written_is_told(flags):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", PROGRAM, *flags], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: standard output cannot be written: No space left on device\n")


@pytest.mark.parametrize("what", ["memory", "xla"])
def test_too_little_memory_is_told(what):
    done = _program("--what", what)
    assert done.returncode == 1
    assert re.match(r"error: there is not enough memory.* Use smaller batches", done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_no_lack_of_memory():
    """Although TensorStore's error begins with the same word as XLA's."""
    done = _program("--what", "disk")
    assert done.returncode == 1
    assert re.fullmatch(r"error: a disk is full \(.*No space left on device\]\)\. Free some space\n", done.stderr)


def test_a_reader_that_leaves_ends_a_program_without_a_word():
    command = [sys.executable, "-c", PROGRAM, "--what", "write"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "text\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 0
    assert "BrokenPipeError: of somebody else" in _program("--what", "pipe").stderr


def test_a_program_whose_errors_nobody_reads_has_not_succeeded():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as broken:
        done = subprocess.run([sys.executable, "-c", PROGRAM, "--what", "write"], stdout=broken, stderr=broken)
    assert done.returncode == 141


IMPORT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "jax":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Stop())
sys.argv, sys.orig_argv = ["-m"], ["python", "-m", "qkvflow.sample_lm"]  # as Python has them at this moment
import qkvflow
"""


def test_stopped_while_it_imports():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (130, "\nstopped by Ctrl-C\n")


def test_no_garbage_is_looked_for_while_a_program_imports(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["qkvflow"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    try:
        imports_begin()
        assert not gc.isenabled()
        imports_end()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()
    monkeypatch.setattr(sys, "argv", ["notebook"])
    imports_begin()
    imports_end()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_help_names_the_keys():
    done = _program("--help")
    assert done.returncode == 0
    assert "--what" in done.stdout
    assert "--config_path" in done.stdout


@pytest.mark.parametrize(
    ("number", "status", "stderr"),
    [(signal.SIGINT, 130, "\nstopped by Ctrl-C\n"), (signal.SIGTERM, 143, "")],
)
def test_signals_end_a_program_with_the_status_that_shells_expect(number, status, stderr):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--what", "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.communicate(timeout=120)[1] == stderr
    assert process.returncode == status


@dataclass
class Spoken:
    text: Text | None = None
    texts: list[Text] | None = None
    count: int = 1


def test_text_is_taken_as_it_stands():
    """YAML would make a mapping, a number, null and a list of these."""
    for words in ("Note: this", "1e3", "null", "[a, b]", "", "{", "a # b"):
        assert parse(Spoken, ["--text", words])[0].text == words
    several = parse(Spoken, ["--texts", "a: b", "true", "--count", "2", "--texts", "c"])[0]
    assert (several.texts, several.count) == (["a: b", "true", "c"], 2)
    assert parse(Spoken, [])[0] == Spoken()
    with pytest.raises(UserError, match="unexpected word `b`"):
        parse(Spoken, ["--text", "a", "b"])


def test_a_section_does_not_discard_what_stands_before_it():
    """Only that which stands before it: the other order keeps both."""
    before, section = ["--model.depth.steps", "8"], ["--model.depth", "{solver: heun}"]
    with pytest.raises(
        UserError, match=r"--model\.depth replaces .* --model\.depth\.steps, .* give --model\.depth first"
    ):
        parse(TrainConfig, [*before, *section])
    depth = parse(TrainConfig, ["--model.type", "neuralode", *section, *before])[0].model.depth
    assert (depth.steps, depth.solver) == (8, "heun")


def test_of_two_flags_for_one_key_the_last_one_counts():
    """So that flags can be appended to a script's. A section is one value: it replaces the first one's, whole."""
    typed = ["--model.type", "neuralode", "--trainer.seed", "1", "--trainer.seed", "2"]
    assert parse(TrainConfig, typed)[0].trainer.seed == 2
    sections = ["--model.depth", "{solver: heun, steps: 8}", "--model.depth", "{solver: midpoint}"]
    depth = parse(TrainConfig, ["--model.type", "neuralode", *sections])[0].model.depth
    assert (depth.solver, depth.steps) == ("midpoint", DepthConfig().steps)
