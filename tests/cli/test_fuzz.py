"""Damaged input, 300 pieces of it: each ends in a clear error or is read; no hang, no other exception, nothing lost.

Other 300: `FUZZ_SEED=1000000 pytest tests/cli/test_fuzz.py -m slow`.
"""

import contextlib
import json
import os
import random
import shutil
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from levanter.tokenizers import load_tokenizer

from qkvflow import train_lm
from qkvflow.cli import parse
from qkvflow.errors import UserError
from qkvflow.runs import TrainConfig, load_run
from qkvflow.training import session
from qkvflow.training.loop import Outcome

pytestmark = pytest.mark.slow

FIRST = int(os.environ.get("FUZZ_SEED", "0"))
SECONDS = 120  # for one piece, on a busy machine; a hang is longer
STRANGE = [
    *("-1", "0", "1", "3.7", "1e30", "-.inf", ".nan", "null", "true", "''", "[]", "{}", "[1, {a: 2}]", "{type: gpt2}"),
    *("2020-01-01", "0x1F", "1_000", "!!python/object/apply:os.system ['touch HACKED']", "&a [*a]", "*nobody", "~"),
    *("../../etc/passwd", "/dev/null", "gs://bucket/x", "http://127.0.0.1:9/x", "'\\0'", "💥", "x" * 5000, "[" * 3000),
]
TINY = {
    "data": {"tokenizer": "byte", "train": "text.txt", "validation_fraction": 0.1, "cache_dir": "cache"},
    "model": {
        "type": "neuralode",
        "max_seq_len": 16,
        "hidden_dim": 8,
        "block": {"type": "gpt2", "num_heads": 2, "form": "parallel"},
        "weights": {"type": "generated", "time_embed_dim": 4, "sinusoidal_dim": 4},
        "depth": {"solver": "euler", "steps": 2, "endpoint": "right", "adjoint": "checkpoint"},
    },
    "trainer": {"id": "tiny", "seed": 0, "train_batch_size": 2, "num_train_steps": 1, "steps_per_eval": 1},
    "optimizer": {"type": "adam", "learning_rate": 1e-3, "warmup": 0.1},
    "weight_decay_on": "matrices",
}
OTHERS = [
    {"block": {"type": "llama", "num_heads": 2, "num_kv_heads": 1}, "control": {"dim": 2}, "prelude_layers": 1},
    {"block": {"type": "ssm", "num_heads": 2, "state_size": 4}, "weights": {"type": "modulated", "hidden_dim": 4}},
    {"depth": {"solver": "tsit5", "steps": 2, "rtol": 1e-2, "atol": 1e-2, "max_steps": 8}},
]


# --- damage -----------------------------------------------------------------------------------------------


def damage_text(text: str, draw: random.Random) -> str:
    """One or two changes of the kinds that typing, editors and merges make."""
    lines = text.splitlines()
    for _ in range(draw.choice([1, 1, 2])):
        i = draw.randrange(len(lines))
        key, colon, _ = lines[i].partition(":")
        kind = draw.randrange(9)
        if kind == 0:
            del lines[i]
        elif kind == 1:
            lines.insert(draw.randrange(len(lines) + 1), lines[i])
        elif kind == 2:
            lines[i] = draw.choice([" ", "  ", "\t", "-  "]) + lines[i]
        elif kind == 3:
            lines[i] = lines[i].lstrip()
        elif kind == 4:
            at = draw.randrange(len(key) or 1)
            lines[i] = key[:at] + draw.choice("abz_-. ") + key[at + 1 :] + lines[i][len(key) :]
        elif kind == 5:
            lines = [*lines[:i], lines[i][: draw.randrange(len(lines[i]) + 1)]]
        elif kind == 6:
            lines[i] = lines[i].replace(" ", "", 1) if draw.random() < 0.5 else lines[i].replace(":", "", 1)
        else:
            lines[i] = f"{key}{colon} {draw.choice(STRANGE)}"
        lines = lines or [""]
    return "\n".join(lines) + "\n"


def damage_bytes(content: bytes, draw: random.Random) -> bytes:
    """Bits flipped, a part gone, zeroed, doubled, or all of it."""
    at, until = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    kind = draw.randrange(6)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + bytes(until - at) + content[until:]
    if kind == 2:
        return content[:until] + content[at:]
    if kind == 3:
        return b""
    if kind == 4:
        return draw.randbytes(draw.randrange(200))
    flipped = bytearray(content or b"\0")
    for _ in range(draw.choice([1, 1, 20])):
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


# --- what must hold ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def read_or_refused():
    """No exception but `UserError` with a text that a person can read, and none that takes for ever."""

    def hang(number, frame):
        raise TimeoutError(f"no answer after {SECONDS} s")

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        yield
    except UserError as error:
        told = str(error)
    else:
        told = "it was read"
    finally:
        signal.alarm(0)
    assert len(told) > 10, told
    assert "Traceback" not in told


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a text; training ends where its first step would begin."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "train", lambda *args, **kwargs: Outcome(0, 1.0, None, 0))
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times.\n" * 40)
    return tmp_path


def train(*words: str) -> None:
    train_lm.main(parse(TrainConfig, ["--config_path", "tiny.yaml", *words])[0])


def valid(number: int) -> dict:
    config = json.loads(json.dumps(TINY))
    config["model"] |= {} if number == 0 else OTHERS[number - 1]
    return config


@pytest.mark.parametrize("number", range(len(OTHERS) + 1))
def test_undamaged(place, number):
    """The control: all of this does start."""
    Path("tiny.yaml").write_text(yaml.safe_dump(valid(number)))
    train()
    assert Path("runs/tiny/config.yaml").is_file()


@pytest.mark.parametrize("part", range(12))
def test_configurations(place, part):
    """120 of them."""
    text = Path("text.txt").read_bytes()
    for seed in range(10 * part, 10 * part + 10):
        draw = random.Random(FIRST + seed)
        good = yaml.safe_dump(valid(seed % (len(OTHERS) + 1)), sort_keys=False)
        Path("tiny.yaml").write_text(damage_text(good, draw), encoding="utf-8")
        with read_or_refused():
            train()
        assert Path("text.txt").read_bytes() == text
        assert not [*place.rglob("HACKED")]
        shutil.rmtree("runs", ignore_errors=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one step."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_text("It was the best of times, it was the worst of times.\n" * 40)
        Path("tiny.yaml").write_text(yaml.safe_dump(valid(0)))
        train()
    return folder


@pytest.mark.parametrize("part", range(9))
def test_run_directories(place, finished, part):
    """90 of them: one file each is damaged, gone, or a folder. Then the run is loaded, and trained on."""
    for seed in range(10 * part, 10 * part + 10):
        draw = random.Random(FIRST + 1000 + seed)
        shutil.rmtree("runs", ignore_errors=True)
        shutil.copytree(finished, place, dirs_exist_ok=True)
        files = sorted(p for p in Path("runs/tiny").rglob("*") if p.is_file() and "tensorboard" not in p.parts)
        victim = Path("runs/tiny/config.yaml") if draw.random() < 0.25 else draw.choice(files)
        content = victim.read_bytes()
        kind = draw.randrange(6)
        if kind == 0 or not content:
            victim.unlink()
        elif kind == 1:
            victim.unlink()
            victim.mkdir()
        elif kind < 4 and victim.suffix in (".yaml", ".json", ".jsonl"):
            victim.write_text(damage_text(content.decode(), draw), encoding="utf-8")
        else:
            victim.write_bytes(damage_bytes(content, draw))
        load_tokenizer.cache_clear()  # by path: as in a new process
        before = {p: p.read_bytes() for p in Path("runs/tiny").rglob("step-*/**/*") if p.is_file()}
        with read_or_refused():
            load_run("runs/tiny")
        with read_or_refused():
            train("--trainer.num_train_steps", "2", "--accept_changes", "true")
        kept = {p.read_bytes() for p in Path("runs/tiny").rglob("*") if p.is_file()}
        lost = [p for p, x in before.items() if x not in kept and p.name != "metadata.json"]
        assert not lost or not (victim.parent / "metadata.json").is_file(), f"{lost} after damage to {victim}"


RECORDS = [{"text": f"Record {i}. " * 5, "control": [0.5, i / 10]} for i in range(30)]


@pytest.mark.parametrize("part", range(9))
def test_data_files(place, part):
    """90 of them: plain text, JSON lines, parquet."""
    Path("tiny.yaml").write_text(yaml.safe_dump(valid(1)))
    jsonl = "".join(json.dumps(r) + "\n" for r in RECORDS)
    pq.write_table(pa.Table.from_pylist(RECORDS), "good.parquet")
    contents = {
        "txt": Path("text.txt").read_bytes(),
        "jsonl": jsonl.encode(),
        "parquet": Path("good.parquet").read_bytes(),
    }
    for seed in range(10 * part, 10 * part + 10):
        draw = random.Random(FIRST + 2000 + seed)
        kind = draw.choice(["txt", "jsonl", "parquet"])
        content = contents[kind]
        if kind == "jsonl" and draw.random() < 0.6:
            damaged = damage_text(content.decode(), draw).encode("utf-8")
        else:
            damaged = damage_bytes(content, draw)
        file = Path(f"damaged-{seed}.{kind}")
        file.write_bytes(damaged)
        control = () if kind == "txt" or draw.random() < 0.5 else ("--data.control_key", "control")
        with read_or_refused():
            train("--data.train", str(file), *control)
        assert file.read_bytes() == damaged
        shutil.rmtree("runs", ignore_errors=True)
