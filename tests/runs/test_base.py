"""The base of a LoRA run: what is said if it is damaged or gone."""

import pytest
from support.earlier import restore

from qkvflow.checksums import write_checksums
from qkvflow.errors import UserError
from qkvflow.runs import load_run


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return restore(tmp_path)


def base_of(place):
    """The one checkpoint that the run `lora` was made from."""
    checkpoint = place / "runs/flow/checkpoints/step-3"
    if not (checkpoint / "checksums.json").is_file():
        write_checksums(checkpoint)
    return checkpoint


def test_a_damaged_base_is_to_be_put_back(place):
    victim = max((p for p in base_of(place).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(UserError, match="is damaged: its file") as error:
        load_run("runs/lora")
    assert str(error.value).endswith("The run runs/lora was made from it and needs it: restore it from a copy")
    assert "--checkpoint_step" not in str(error.value)  # a base is one checkpoint, and no other


def test_a_base_without_its_checkpoint_is_told_too(place):
    base_of(place).rename(place / "elsewhere")
    with pytest.raises(UserError, match=r"no checkpoint.*restore it from a copy") as error:
        load_run("runs/lora")
    assert "--checkpoint_step" not in str(error.value)


def test_a_damaged_run_with_one_checkpoint_offers_no_others(place):
    victim = base_of(place) / "checksums.json"
    victim.write_text("{")
    with pytest.raises(UserError, match=r"Restore it from a copy$"):
        load_run("runs/flow", 3)
