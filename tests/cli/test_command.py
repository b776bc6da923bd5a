"""The command `qkvflow`: fast, helpful, and the same programs; and that `--help` tells of every key."""

import dataclasses
import importlib
import itertools
import os
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest

import qkvflow_command
from qkvflow.cli import parse
from qkvflow.cli.keys import field_docs, key_table, sections
from qkvflow.config import read_config
from qkvflow.config.yaml_file import read_yaml, shipped
from qkvflow.errors import UserError
from qkvflow.runs.config import FinetuneConfig, TrainConfig
from qkvflow.runs.directory import run_id
from qkvflow_command import COMMANDS, VERSION, main, train_words

FLAGS = 32  # characters of the column of flags
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "qkvflow_command.py")]


def run(*words: str, **options) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, env=environment, **options)


def config_class(name: str) -> type:
    """Of the `main` of a command's module."""
    module = importlib.import_module(COMMANDS[name].module)
    return typing.get_type_hints(module.main)["config"]


def test_help_needs_no_library(tmp_path):
    begun = time.monotonic()
    done = run("--help", cwd=tmp_path)
    taken = time.monotonic() - begun
    assert done.returncode == 0, done.stderr
    for name, command in COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert command.about in done.stdout
    code = (
        "import sys, qkvflow_command as q; q.main(['--help']); sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0
    assert taken < 3  # importing JAX alone takes that on a busy machine


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["trian"], "`train`"),
        (["evaluate"], "`eval`"),
        (["fine-tune"], "`finetune`"),
        (["reprot", "--run", "x"], "`report`"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_name(words, near, capsys):
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert f"did you mean {near}?" in said.err


def test_other_words(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err == qkvflow_command.usage()
    assert main(["x" * 1000]) == 2
    assert len(capsys.readouterr().err) < 500
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"qkvflow {VERSION}\n"
    assert main(["--completion"]) == 0
    assert subprocess.run(["bash", "-c", capsys.readouterr().out + "complete -p qkvflow"]).returncode == 0


def test_a_command_is_its_module(tmp_path):
    """The same exit status and the same words, whichever way it is called."""
    words = ["--run", "nowhere"]
    by_command = run("eval", *words, cwd=tmp_path)
    by_module = subprocess.run(
        [sys.executable, "-m", COMMANDS["eval"].module, *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (by_command.returncode, by_command.stdout) == (by_module.returncode, by_module.stdout) == (2, "")
    last = [done.stderr.splitlines()[-1] for done in (by_command, by_module)]
    assert last[0] == last[1]
    assert last[0].startswith("error: ")


def test_train_takes_the_quickstart_if_no_model_is_named():
    assert train_words([]) == ["--config_path", "configs/quickstart.yaml"]
    for words in (["--trainer.id", "x"], ["--model.hidden_dim", "8"]):
        assert train_words(words) == [*train_words([]), *words]
    for words in (["--config_path=a.yaml"], ["--model.type", "gpt2"], ["--model", "{type: gpt2}"], ["--help", "model"]):
        assert train_words(words) == words


def test_shipped_configurations_are_found_anywhere(tmp_path, monkeypatch):
    """By the name that they have in a checkout, or short; a file on disk comes first."""
    monkeypatch.chdir(tmp_path)
    assert {f"configs/{name}.yaml" for name in shipped()} == {
        p.relative_to(ROOT).as_posix() for p in (ROOT / "configs").rglob("*.yaml")
    }
    for name in ("quickstart", "quickstart.yaml", "configs/quickstart.yaml"):
        assert read_yaml(Path(name)) == read_yaml(ROOT / "configs" / "quickstart.yaml")
    assert read_yaml(Path("wikitext2/neuralode"))["model"]["type"] == "neuralode"
    Path("quickstart").write_text("mine: 1")
    assert read_yaml(Path("quickstart")) == {"mine": 1}
    with pytest.raises(UserError, match=r"similar names: configs/quickstart.yaml"):
        read_yaml(Path("configs/quikstart.yaml"))
    with pytest.raises(UserError, match="there is no configuration file"):
        read_yaml(tmp_path / "configs" / "quickstart.yaml")


def test_a_shipped_configuration_is_read_and_named_as_a_file_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        read_config(Path("quickstart"), TrainConfig).model
        == read_config(ROOT / "configs" / "quickstart.yaml", TrainConfig).model
    )
    for name in ("wikitext103/small", "wikitext103/small.yaml", "configs/wikitext103/small.yaml"):
        config = parse(TrainConfig, ["--config_path", name])[0]
        assert run_id(None, config.config_path) == "wikitext103-small"
    Path("wikitext103").mkdir()
    Path("wikitext103/small").write_bytes((ROOT / "configs" / "quickstart.yaml").read_bytes())
    assert run_id(None, parse(TrainConfig, ["--config_path", "wikitext103/small"])[0].config_path) == "small"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_a_line_for_each_key(name):
    cls = config_class(name)
    docs, table = field_docs(cls), key_table(cls)
    for field in dataclasses.fields(cls):
        flag = field.metadata.get("flag", field.name)
        assert docs.get(field.name), f"say in the docstring of {cls.__name__} what {field.name} is"
        assert flag is None or f"  --{flag} " in table
    assert max(map(len, table.splitlines())) <= 120


SECTIONS = [
    "model",
    "model.block",
    "model.weights",
    "model.depth",
    "model.depth.steps",
    "model.control",
    "data",
    "optimizer",
]


@pytest.mark.parametrize("dotted", [*SECTIONS, "mode", "official"])
def test_help_of_sections(dotted):
    table = sections(FinetuneConfig, dotted)
    flags = [line for line in table.splitlines() if line.startswith("  --")]
    assert flags
    assert all(line.startswith(f"  --{dotted}.") for line in flags)
    lines = table.splitlines()
    told = [line[FLAGS:] if len(line) > FLAGS else after[FLAGS:] for line, after in itertools.pairwise([*lines, ""])]
    bare = [line for line, text in zip(lines, told, strict=True) if line.startswith("  --") and text[:1] in ("", "[")]
    assert not bare, "keys without a word of explanation"


def test_help_of_a_key(capsys):
    table = sections(TrainConfig, "model.depth")
    assert "--model.depth.solver TEXT" in table
    assert "[euler]" in table
    assert "--trainer.mp" in sections(TrainConfig, "trainer")
    with pytest.raises(UserError, match=r"`model\.dept` is not a key: did you mean `depth`"):
        sections(TrainConfig, "model.dept")
    with pytest.raises(UserError, match="single value"):
        sections(TrainConfig, "run_dir")


def test_help_of_a_program():
    done = run("sample", "--help")
    assert done.returncode == 0
    assert "usage: qkvflow sample" in done.stdout
    assert "--temperature X               0 is greedy. [0.8]" in done.stdout


def test_one_version():
    import qkvflow

    assert qkvflow.__version__ == VERSION
    assert f"version: {VERSION}" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text()
