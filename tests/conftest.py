"""Settings that make silent mistakes loud, and fixtures; material that tests share is in `support`."""

# ruff: noqa: E402
import gc
import itertools
import os
import shutil
import tempfile
import threading
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time of these tests is compilation, and laws hold at any level of optimisation: half of the time. Without
# optimisation, XLA's older emitters of fused loops compile a training step in a quarter of the time of the newer.
_CHEAP = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_CHEAP += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_CHEAP} --xla_cpu_parallel_codegen_split_count=1"
# Workers and the programs that they start compile much that is the same. The workers inherit the folder.
_IS_FIRST = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if _IS_FIRST:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="qkvflow-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

import jax
import pytest
from jax._src.interpreters import mlir
from support.models import random_tokens

gc.set_threshold(100_000, 20, 50)  # by default, looking through JAX's many objects takes a seventh of the time
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")  # arrays of different ranks meet only where that is written
jax.config.update("jax_default_prng_impl", "rbg")  # compiles in no time; programs use JAX's default

_NEW_CONTEXT, _CONTEXTS = mlir.make_ir_context, threading.local()


def _context_in_use():
    """JAX makes a context for each of thousands of small programs, which takes a fifth of the time of these tests.

    So a hundred programs of a thread share one; not all, because a context keeps the constants of its programs.
    """
    left, context = getattr(_CONTEXTS, "use", (0, None))
    if left == 0:
        left, context = 100, _NEW_CONTEXT()
    _CONTEXTS.use = (left - 1, context)
    return context


mlir.make_ir_context = _context_in_use

_MANY_MAPS, _TESTS = 40_000, itertools.count(1)
_HEAVY = {
    line for line in (Path(__file__).parent / "support" / "heavy.txt").read_text().splitlines() if line[:1] != "#"
}


def pytest_collection_modifyitems(config, items):
    """Marks the tests of `support/heavy.txt` as slow."""
    names = {item.nodeid for item in items}
    files = {name.split("::")[0] for name in names}
    gone = {name for name in _HEAVY if name.split("::")[0] in files} - names
    if gone and not any("::" in word for word in config.args):
        raise pytest.UsageError(f"tests/support/heavy.txt names tests that are no more: {sorted(gone)}")
    for item in items:
        if item.nodeid in _HEAVY:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_teardown(item, nextitem):
    """Every compiled function holds pieces of memory; at Linux's limit (65,530 of a process) the compiler crashes."""
    if next(_TESTS) % 20:  # reading the list takes milliseconds
        return
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPS:
        jax.clear_caches()


def pytest_sessionfinish():
    if _IS_FIRST:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture
def tokens():
    return random_tokens()


@pytest.fixture(scope="module")
def numbers_of_lanes():
    """The random numbers of programs, JAX's default: those of the tests (rbg) are others if they are vmapped."""
    before = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", "threefry2x32")
    yield
    jax.config.update("jax_default_prng_impl", before)
