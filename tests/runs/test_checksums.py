"""Two processes write one checkpoint and check it: each hashes, and reads, its own half."""

import json
import socket
import subprocess
import sys

import pytest

from qkvflow.checksums import CHECKSUMS, damage_of
from qkvflow.runs.processes import shares

pytestmark = pytest.mark.program

MEGABYTES = 32
SCRIPT = """
import json, os, sys
from pathlib import Path
folder, index, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
import jax, numpy as np
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
import qkvflow
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.checkpoint import CheckpointerConfig
from qkvflow.places import Place
from qkvflow.runs.processes import damage_found_together
from qkvflow.training.checkpointer import create_checkpointer

sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
rows = MEGABYTES * 1_000_000 // 8 // 4 // 1000
tree = {
    str(i): jax.make_array_from_callback(
        (rows, 1000), sharding,
        lambda _: np.random.default_rng([i, index]).standard_normal((rows // 2, 1000), np.float32))
    for i in range(8)
}
jax.block_until_ready(tree)
read = lambda: int(Path("/proc/self/io").read_text().split()[1])
found = {}
checkpointer = create_checkpointer(CheckpointerConfig(base_path=str(folder)))
before = read()
checkpointer.save_checkpoint(tree, 3, "step-3")
checkpointer.wait_until_finished()
found["save"] = read() - before
before = read()
found["whole"] = damage_found_together(Place.of(folder / "step-3"))
found["check"] = read() - before
multihost_utils.sync_global_devices("checked")
for owner in range(2):  # in a file of each
    if index == 0:
        file = max((folder / "step-3" / "d").glob(f"{owner}-*"), key=lambda path: path.stat().st_size)
        sound = file.read_bytes()
        file.write_bytes(sound[:1000] + bytes([sound[1000] ^ 1]) + sound[1001:])
        found[f"name {owner}"] = file.name
    multihost_utils.sync_global_devices("damaged")
    found[f"damaged {owner}"] = damage_found_together(Place.of(folder / "step-3"))
    multihost_utils.sync_global_devices("told")
    if index == 0:
        file.write_bytes(sound)
(folder / f"found-{index}.json").write_text(json.dumps(found))
jax.distributed.shutdown()
os._exit(0)
""".replace("MEGABYTES", str(MEGABYTES))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the processes found, and the folder of the checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    words = [[sys.executable, "-c", SCRIPT, str(folder), str(i), port] for i in range(2)]
    started = [subprocess.Popen(each, stderr=subprocess.PIPE, text=True) for each in words]
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
    return [json.loads((folder / f"found-{i}.json").read_text()) for i in range(2)], folder


def test_each_process_reads_what_it_has_written_and_no_more(found):
    """Before, the first one read all of it."""
    for process in found[0]:
        assert MEGABYTES / 2 * 1e6 <= process["save"] < MEGABYTES / 2 * 1e6 + 2e6


def test_all_files_are_in_the_record(found):
    checkpoint = found[1] / "step-3"
    named = set(json.loads((checkpoint / CHECKSUMS).read_text()))
    there = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert named == there - {CHECKSUMS, "metadata.json"}
    assert damage_of(checkpoint) is None


@pytest.mark.parametrize("sizes", [(16, 8, 8), (8, 8, 8, 8), (12, 16, 4), (16, 16)])
def test_shares_have_equal_sizes(sizes):
    """However a checkpoint's bytes fall into files, which depends on the time that writing takes."""
    named = {str(i): size for i, size in enumerate(sizes)}
    parts = shares(named, 2)
    assert sorted(name for part in parts for name in part) == sorted(named)
    assert [sum(named[name] for name in part) for part in parts] == [16, 16]


def test_a_checkpoint_is_checked_in_shares(found):
    for process in found[0]:
        assert process["whole"] is None
        assert process["check"] < 0.75 * MEGABYTES * 1e6


def test_all_hear_of_damage_that_one_has_found_and_the_first_one_names_it(found):
    first, second = found[0]
    for owner in range(2):
        assert first[f"name {owner}"] in first[f"damaged {owner}"]
        assert second[f"damaged {owner}"] is not None
