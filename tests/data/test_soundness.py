"""A token cache that is not as it was built is never read, and is built again when asked."""

import contextlib
import errno
import itertools
import os
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from qkvflow.checksums import CHECKSUMS
from qkvflow.data import DataConfig, cache, soundness
from qkvflow.errors import UserError

TEXT = "".join(f"line {n} with some words\n" for n in range(400))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    (folder / "a.txt").write_text(TEXT)
    resolve(folder).build_caches("train")
    return folder


@pytest.fixture
def place(built, tmp_path):
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    return tmp_path


def resolve(folder, **settings):
    data = DataConfig(train=str(folder / "a.txt"), validation_fraction=0, cache_dir=str(folder / "cache"), **settings)
    return data.resolve(folder / "tokenizer")


def tokens(folder, **settings) -> list[int]:
    found = resolve(folder, **settings).build_caches("train")["text"]
    data = found.jagged_array_tree()["input_ids"].data
    return np.asarray(data[: found.flat_field_length("input_ids")].read().result()).tolist()


def move(folder) -> Path:
    """The cache of a copied folder; its name says which file was read, and the copy is another file."""
    data = resolve(folder)
    (found,) = (folder / "cache").iterdir()
    target = Path(data.components["text"].cache_dir)
    if found != target:
        found.rename(target)
    return target / "train"


FILES = ("input_ids/data/c/0", "input_ids/offsets/c/0", "input_ids/data/zarr.json")


@pytest.mark.parametrize(
    ("file", "kind"),
    [*itertools.product(FILES, ("gone", "cut", "flipped")), (CHECKSUMS, "cut"), (CHECKSUMS, "flipped")],
)
def test_damage_is_named_and_mended_when_asked(place, file, kind):
    cache = move(place)
    victim = cache / file
    content = bytearray(victim.read_bytes())
    if kind == "gone":
        victim.unlink()
    elif kind == "cut":
        victim.write_bytes(content[:-20])
    else:
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    words = rf"token cache {cache} is damaged: its file {file}|its {CHECKSUMS} cannot|sha256 differs"
    with pytest.raises(UserError, match=words) as error:
        tokens(place)
    assert "--data.rebuild_caches true" in str(error.value)
    assert tokens(place, rebuild_caches=True) == [*TEXT.encode(), 256]
    assert tokens(place) == [*TEXT.encode(), 256]


def test_any_single_bit_is_seen(place):
    cache, draw = move(place), random.Random(0)
    victim = cache / "input_ids/data/c/0"
    content = victim.read_bytes()
    for _ in range(24):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        victim.write_bytes(flipped)
        assert "sha256 differs" in (soundness.damage(cache) or "")


def test_a_sound_cache_is_not_built_again(place):
    cache = move(place)
    before = (cache / "input_ids/data/c/0").stat().st_ino
    assert tokens(place, rebuild_caches=True) == [*TEXT.encode(), 256]
    assert (cache / "input_ids/data/c/0").stat().st_ino == before


def test_a_cache_of_an_older_version_gets_checksums_if_it_is_whole(place):
    cache = move(place)
    (cache / CHECKSUMS).unlink()
    assert tokens(place) == [*TEXT.encode(), 256]
    assert (cache / CHECKSUMS).is_file()
    (cache / CHECKSUMS).unlink()
    for file in ("input_ids/data/c/0", "input_ids/offsets/c/0"):
        kept = (cache / file).read_bytes()
        (cache / file).unlink()
        with pytest.raises(UserError, match="is damaged"):
            tokens(place)
        assert not (cache / CHECKSUMS).exists()
        (cache / file).write_bytes(kept)


def test_of_a_big_cache_sizes_and_small_files_are_compared_and_all_of_it_on_demand(place, monkeypatch):
    cache = move(place)
    monkeypatch.setattr(soundness, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(soundness, "_SMALL_BYTES", 1000)
    victim = cache / "input_ids/data/c/0"
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(content)
    assert soundness.damage(cache) is None
    assert "sha256 differs" in (soundness.damage(cache, whole=True) or "")
    with pytest.raises(UserError, match="sha256 differs"):
        tokens(place, verify_caches=True)
    victim.write_bytes(content[:-1])
    assert "bytes instead of" in (soundness.damage(cache) or "")
    victim.write_bytes(content)
    assert tokens(place, verify_caches=True, rebuild_caches=True) == [*TEXT.encode(), 256]
    assert soundness.damage(cache, whole=True) is None


@pytest.mark.parametrize("first", [0, 1])
def test_processes_of_a_run_that_do_not_see_each_others_locks_build_one_cache(tmp_path, monkeypatch, first):
    """As on a mounted bucket: one process builds from beginning to end while another one is in the middle."""
    (tmp_path / "a.txt").write_text(TEXT)
    expected = [*TEXT.encode(), 256]
    monkeypatch.setattr(cache, "locked", lambda *args, **options: contextlib.nullcontext())
    monkeypatch.setattr(jax, "process_index", lambda: first)
    batches, others = cache._batches, []

    def interrupted(shards):
        yield from batches(shards)
        if not others:
            others.append([])
            monkeypatch.setattr(jax, "process_index", lambda: 1 - first)
            others[0] = tokens(tmp_path)
            monkeypatch.setattr(jax, "process_index", lambda: first)

    monkeypatch.setattr(cache, "_batches", interrupted)
    assert tokens(tmp_path) == expected
    assert others == [expected]
    assert tokens(tmp_path) == expected
    (folder,) = (tmp_path / "cache").iterdir()
    assert {path.name for path in folder.iterdir()} <= {"train", "train.lock"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_while_a_cache_is_built_is_named(tmp_path, monkeypatch, number):
    """The store's own words, although what it had written is removed, and there is space again."""

    def write(writer, rows):
        raise ValueError(f"RESOURCE_EXHAUSTED: Error writing 'x' [OS error {number}: {os.strerror(number)}]")

    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.setattr(cache.SerialCacheWriter, "write_batch", write)
    with pytest.raises(UserError, match=rf"token cache {tmp_path}/cache/text-\w+ is full; .*`data.cache_dir`"):
        resolve(tmp_path).build_caches("train")
    monkeypatch.undo()
    resolve(tmp_path).build_caches("train")
