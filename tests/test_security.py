"""Runs and texts of strangers: nothing of theirs is executed, and no name of theirs leads out of where it belongs."""

import json
import pickle
import shutil

import numpy as np
import pytest
import yaml

from qkvflow import sample_lm, serve_lm, train_lm
from qkvflow.checksums import CHECKSUMS, damage_of
from qkvflow.cli import parse
from qkvflow.config import decode
from qkvflow.errors import UserError
from qkvflow.generation.prompts import read_prompts
from qkvflow.runs import TrainConfig, load_run

EVIL = "import pathlib\npathlib.Path({mark!r}).touch()\nclass Tokenizer: pass\n"


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A run of one step."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times.\n" * 40)
    config = {
        "run_dir": str(folder),
        "data": {"tokenizer": "byte", "train": str(folder / "text.txt"), "cache_dir": str(folder / "cache")},
        "model": {
            "type": "neuralode",
            "max_seq_len": 16,
            "hidden_dim": 8,
            "block": {"type": "gpt2", "num_heads": 2},
            "weights": {"type": "constant"},
            "depth": {"steps": 2},
        },
        "trainer": {"id": "run", "train_batch_size": 2, "num_train_steps": 1},
    }
    train_lm.main(decode(TrainConfig, config))
    return folder / "run"


@pytest.fixture
def run(honest, tmp_path):
    return shutil.copytree(honest, tmp_path / "run")


def test_a_configuration_cannot_run_code(run, tmp_path):
    mark = tmp_path / "executed"
    config = run / "config.yaml"
    call = f"!!python/object/apply:builtins.open ['{mark}', 'w']"
    config.write_text(config.read_text().replace("hidden_dim: 8", f"hidden_dim: {call}"))
    assert call in config.read_text()
    for read in (lambda: load_run(run), lambda: parse(TrainConfig, ["--config_path", str(config)])):
        with pytest.raises(UserError, match="not valid YAML"):
            read()
    assert not mark.exists()


def test_the_loader_of_pickles_would_have_run_it(tmp_path):
    """The control: these traps work where they are stepped on."""
    mark = tmp_path / "executed"
    pickle.loads(pickle.dumps(Trap(mark))).close()
    assert mark.exists()


def test_arrays_are_never_unpickled(run, tmp_path, monkeypatch):
    """Pickles in place of files of a checkpoint: no unpickler is ever asked, with checksums that fit or without."""
    mark = tmp_path / "executed"

    def asked(*args, **kwargs):
        raise AssertionError("something is unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, asked)
    load_run(run)
    checkpoint = next((run / "checkpoints").glob("step-*"))
    (checkpoint / CHECKSUMS).unlink()
    for file in [p for p in checkpoint.rglob("*") if p.is_file() and p.name != "metadata.json"]:
        file.write_bytes(pickle.dumps(Trap(mark)) + np.zeros(4).tobytes())
    with pytest.raises(UserError):
        load_run(run)
    assert not mark.exists()


def test_a_tokenizer_brings_no_code(run, tmp_path):
    mark = tmp_path / "executed"
    (run / "tokenizer" / "evil.py").write_text(EVIL.format(mark=str(mark)))
    settings = run / "tokenizer" / "tokenizer_config.json"
    content = json.loads(settings.read_text()) if settings.is_file() else {}
    auto = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    settings.write_text(json.dumps(content | {"tokenizer_class": "Tokenizer", "auto_map": auto}))
    try:
        _, _, tokenizer = load_run(run)
        assert tokenizer.encode("a") == [97]
    except UserError:
        pass
    assert not mark.exists()


def test_checksums_name_no_files_outside(run, tmp_path):
    checkpoint = next((run / "checkpoints").glob("step-*"))
    record = json.loads((checkpoint / CHECKSUMS).read_text())
    (tmp_path / "secret").write_text("secret")
    for name in ("../../../secret", str(tmp_path / "secret")):
        (checkpoint / CHECKSUMS).write_text(json.dumps(record | {name: {"bytes": 1, "sha256": "x"}}))
        told = damage_of(checkpoint)
        assert told is not None
        assert "outside" in told


def test_a_run_stays_in_its_folder(run, tmp_path):
    config = yaml.safe_load((run / "config.yaml").read_text())
    for name in ("../outside", str(tmp_path / "outside"), "a/../../outside"):
        config["trainer"]["id"] = name
        with pytest.raises(UserError, match=r"trainer\.id"):
            train_lm.main(decode(TrainConfig, config))
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize(
    "text", ["../../etc/passwd", "@configs/quickstart.yaml", "~/.ssh/id_rsa", "file:///etc/passwd"]
)
def test_a_prompt_is_text(text):
    assert [p.text for p in read_prompts(text, None)] == [text]
    assert parse(sample_lm.SampleConfig, ["--run", "a", "--prompt", text])[0].prompt == text


def test_the_server_is_alone_with_this_machine():
    assert serve_lm.ServeConfig("runs/a").host == "127.0.0.1"
