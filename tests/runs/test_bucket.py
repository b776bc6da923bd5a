"""Checkpoints and runs in a bucket, on an S3 server of this machine."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.checkpoint import CheckpointerConfig, load_checkpoint
from levanter.trainer import TrainerConfig
from support.bucket import bucket

from qkvflow.checksums import CHECKSUMS, damage_of
from qkvflow.places import Place
from qkvflow.runs.checkpoints import checkpoint_steps, clean_up, newest_good, set_aside
from qkvflow.training.checkpointer import create_checkpointer

pytestmark = pytest.mark.program


@pytest.fixture(scope="module")
def store():
    with bucket("store") as url:
        yield Place.of(url)


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_a_place_is_a_folder_whatever_it_is_made_of(kind, store, tmp_path):
    place = (store if kind == "bucket" else Place.of(tmp_path)) / "places[1]"
    assert (place.folders(), place.files()) == ([], {})
    with pytest.raises(FileNotFoundError):
        place.read("a")
    if kind == "disk":
        (place / "b*" / "c").local.mkdir(parents=True)
    place.write("a", b"12")
    (place / "b*").write("x", b"345")
    (place / "b*" / "c").write("y", b"")
    assert place.read("a") == b"12"
    assert {name: info.bytes for name, info in place.files().items()} == {"a": 2, "b*/x": 3, "b*/c/y": 0}
    assert place.folders() == ["b*"]
    assert place.has("a")
    assert not place.has("b*")
    (place / "b*").move_to(place / "other")
    assert set(place.files()) == {"a", "other/x", "other/c/y"}
    place.remove("a")
    place.remove()
    assert place.files() == {}


def saved(place, steps) -> dict:
    """Checkpoints of these steps, of a small tree, which is returned."""
    checkpointer = create_checkpointer(CheckpointerConfig(base_path=str(place)))
    with TrainerConfig(require_accelerator=False).use_device_mesh():
        tree = {"x": jax.random.normal(jax.random.PRNGKey(0), (64, 256)), "y": jnp.ones(3)}
        for step in steps:
            checkpointer.save_checkpoint(tree, step, f"step-{step}")
        checkpointer.wait_until_finished()
    return tree


def test_a_checkpoint_in_a_bucket_is_what_was_saved_and_carries_the_tags_of_the_store(store):
    place = store / "saved"
    tree = saved(place, [3])
    checkpoint = place / "step-3"
    with TrainerConfig(require_accelerator=False).use_device_mesh():
        found = load_checkpoint(tree, str(checkpoint))
    assert all(np.array_equal(found[name], tree[name]) for name in tree)
    record = json.loads(checkpoint.read(CHECKSUMS))
    assert set(record) == set(checkpoint.files()) - {CHECKSUMS, "metadata.json"}
    assert all(entry["tag"] == checkpoint.files()[name].tag for name, entry in record.items())
    assert damage_of(checkpoint) is None


@pytest.mark.parametrize("what", ["changed", "cut", "gone"])
def test_damage_in_a_bucket_is_seen_and_set_aside(store, what):
    place = store / f"damaged-{what}"
    saved(place, [1, 2])
    checkpoint = place / "step-2"
    name = max(checkpoint.files(), key=lambda name: checkpoint.files()[name].bytes)
    content = bytearray(checkpoint.read(name))
    content[10] ^= 1
    checkpoint.remove(name) if what == "gone" else checkpoint.write(name, bytes(content[what == "cut" :]))
    good, damaged = newest_good(place)
    assert good == 1
    assert name in damaged[0].what
    assert str(set_aside(damaged[0], place / "damaged")) == f"{place}/damaged/step-2"
    assert checkpoint_steps(place) == [1]
    assert (place / "damaged" / "step-2").has("metadata.json")


def test_what_a_killed_save_leaves_in_a_bucket_is_removed(store):
    place = store / "killed"
    saved(place, [1, 2])
    (place / "step-2").remove("metadata.json")
    assert checkpoint_steps(place) == [1]
    clean_up(place)
    assert place.folders() == ["step-1"]
