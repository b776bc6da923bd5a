"""Values of command lines and files: text stays as typed, numbers are decimal, strange ones are told, not traced."""

import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from support.configs import TINY

from qkvflow.cli import parse
from qkvflow.config import decode, read_yaml
from qkvflow.config.yaml_text import dump, load
from qkvflow.errors import UserError
from qkvflow.runs import TrainConfig
from qkvflow.runs.config import FinetuneConfig
from qkvflow.runs.directory import run_id
from qkvflow.sample_lm import SampleConfig

NAMES = [
    "007",
    "7",
    "12:30",
    "750",
    "1.50",
    "1.5",
    "0x10",
    "16",
    "1e3",
    "true",
    "no",
    "2024-01-01",
    "2024-13-45",
    "1_0",
]


@dataclass
class Names:
    name: str = ""
    path: Path = Path()
    either: str | int | None = None
    several: str | list[str] | None = None


@pytest.mark.parametrize("name", NAMES)
def test_names_are_taken_as_typed(name, tmp_path):
    """Distinct names stay distinct, on the command line and in a file."""
    assert parse(Names, ["--name", name, "--path", name])[0] == Names(name, Path(name))
    assert parse(TrainConfig, [*TINY, "--trainer.id", name, "--run_dir", name])[0].trainer.id == name
    assert parse(FinetuneConfig, ["--run", name])[0].run == name
    assert parse(SampleConfig, ["--run", name])[0].run == name
    if name != "true":  # which a file must put in quotes
        (tmp_path / "a.yaml").write_text(f"name: {name}\npath: {name}\n")
        assert parse(Names, ["--config_path", str(tmp_path / "a.yaml")])[0] == Names(name, Path(name))


@pytest.mark.parametrize(
    ("text", "number"),
    [("010", 10), ("0o10", None), ("0x10", None), ("1_000", None), ("12:30", None), ("1e3", None), ("+7", 7)],
)
def test_numbers_are_decimal(text, number, tmp_path):
    (tmp_path / "a.yaml").write_text(f"trainer: {{seed: {text}}}\n")
    for words in (["--trainer.seed", text], ["--config_path", str(tmp_path / "a.yaml")]):
        if number is None:
            with pytest.raises(UserError, match=r"`trainer\.seed` must be an integer"):
                parse(TrainConfig, [*TINY, *words])
        else:
            assert parse(TrainConfig, [*TINY, *words])[0].trainer.seed == number


@pytest.mark.parametrize(
    "key", ["data.train", "trainer.initialize_from", "trainer.id", "run_dir", "trainer.seed", "data"]
)
@pytest.mark.parametrize("empty", ["", "  ", "\n"])
def test_an_empty_value_is_a_mistake(key, empty):
    for words in ([f"--{key}", empty], [f"--{key}={empty}"]):
        with pytest.raises(UserError, match=rf"--{key} has an empty value.*--{key} null"):
            parse(TrainConfig, [*TINY, *words])


def test_null_is_written_null():
    for text in ("~", "#mine.txt", "Null", "NULL"):
        assert parse(TrainConfig, [*TINY, "--data.train", text])[0].data.train == text
        with pytest.raises(UserError, match=r"`trainer\.num_train_steps` must be an integer"):
            parse(TrainConfig, [*TINY, "--trainer.num_train_steps", text])
    assert parse(TrainConfig, [*TINY, "--data.train", "null"])[0].data.train is None
    assert parse(TrainConfig, [*TINY, "--data.train", "'null'"])[0].data.train == "null"
    assert parse(Names, ["--several", "[a, 'b c']"])[0].several == ["a", "b c"]


BOMB = "[&a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]" + "".join(
    f", &{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("trainer.seed", "2024-13-45", "must be an integer"),
        ("model.depth.steps", "{grow: {0.0: 3, 0.5: 6}, choices: 3}", r"unknown key `model\.depth\.steps\.choices`"),
        ("trainer.seed", "!!int x", "is not an integer"),
        ("trainer.seed", "!!timestamp soon", "is not supported"),
        ("trainer.seed", "!!binary a", "is not supported"),
        ("trainer.seed", "9" * 5000, "must be an integer"),
        ("trainer.seed", "1" + 30 * "0", "at least 0 and below"),
        ("trainer.seed", BOMB + "]", "more than 1,000,000 values"),
        ("trainer.seed", "&a [*a]", "1,000,000 values"),
        ("trainer.seed", "[" * 100_000, "nested too deeply"),
        ("trainer.seed", "x" * 1_000_000, "must be an integer"),
        ("trainer.id", "x" * 1_000_000, "must be one folder name"),
        ("trainer.mp", "x" * 1_000_000, "must be a precision"),
        ("trainer.seeed" + "x" * 100_000, "1", "unknown key"),
        ("model.type", "x" * 1_000_000, "unknown choice"),
        ("optimizer.learning_rate", "!!float x", "is not a number"),
        ("optimizer.learning_rate", "1" * 401, "must be a number"),
        ("optimizer.learning_rate", "1" * 400, "must be a finite number"),
        ("optimizer.learning_rate", "1e999", "must be a finite number"),
        ("optimizer.learning_rate", "nan", "must be a finite number"),
    ],
    ids=lambda text: text[:20],
)
def test_strange_values_are_told_shortly_and_soon(key, value, told):
    began = time.monotonic()
    with pytest.raises(UserError, match=told) as error:
        run_id(parse(TrainConfig, [*TINY, f"--{key}", value])[0].trainer.id, None)
    assert len(str(error.value)) < 1500
    assert time.monotonic() - began < 20


def test_a_file_without_end_is_not_read(tmp_path):
    (tmp_path / "a.yaml").write_text("a: " + "x" * (5 << 20))
    with pytest.raises(UserError, match="has more than 4 MiB"):
        read_yaml(tmp_path / "a.yaml")
    with pytest.raises(UserError, match="has more than 4 MiB"):
        read_yaml(Path("/dev/zero"))


@pytest.mark.parametrize("name", ["a\x07", "t\udce9l", "a\x1bb", "a\x7f"])
def test_names_with_characters_that_yaml_does_not_have(name):
    """As typed where text may stand: a name in Latin-1 arrives with lone surrogates."""
    assert parse(Names, ["--name", name, "--path", name, "--either", name])[0] == Names(name, Path(name), name)
    with pytest.raises(UserError, match=r"`trainer\.seed` must be an integer"):
        parse(TrainConfig, [*TINY, "--trainer.seed", name])
    with pytest.raises(UserError, match=r"--trainer\.seed.* is not valid YAML, line 1, column"):
        parse(TrainConfig, [*TINY, "--trainer.seed", f"[{name}]"])


@pytest.mark.parametrize(("byte", "told"), [(0, "0000"), (12, "000C"), (27, "001B"), (127, "007F")])
def test_a_file_with_a_control_character_is_refused_with_its_place(byte, told, tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"a: 1\nb: x%c\n" % byte)
    with pytest.raises(UserError, match=rf"a\.yaml is not valid YAML, line 2, column 5: .*U\+{told}.*Remove it"):
        read_yaml(tmp_path / "a.yaml")


def test_a_number_in_quotes_is_a_number_where_one_may_stand():
    assert decode(Names, {"either": "7"}).either == 7
    assert decode(Names, {"either": "7x"}).either == "7x"


def test_text_is_read_as_it_was_written():
    """Also by PyYAML: characters that end lines, that begin other values, and others, each in three places."""
    ends = ["\n", "\r", "\x85", "\u2028", "\u2029", "\ufeff", "\t", " ", "\x07", "\x7f", "\xa0"]
    for text in map("".join, itertools.product([*ends, *"a1:#-'\"\\", "é", "世", "😀"], repeat=3)):
        written = dump({"key": text, text: [text]})
        assert load(written, "it") == yaml.safe_load(written) == {"key": text, text: [text]}
