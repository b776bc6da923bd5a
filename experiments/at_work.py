"""While a study works: the output of libraries goes to its log, and its runs share a compilation cache."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

import jax
from jax.experimental.compilation_cache import compilation_cache

from qkvflow.cli.quiet import quiet_libraries

_CACHE = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@contextlib.contextmanager
def at_work(run_dir: Path) -> Iterator[TextIO]:
    """Redirects the output of libraries and programs to `experiment.log` in `run_dir`; yields the terminal.

    The runs share a compilation cache. A cached program is the same program, so no number depends on it. Outside the
    block there is none: JAX writes about each program that it loads, to the terminal.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with quiet_libraries() as quiet:
        quiet.log_to(run_dir / "experiment.log")
        with _shared_programs(run_dir / "compiled"):
            yield quiet.terminal


@contextlib.contextmanager
def _shared_programs(folder: Path) -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in _CACHE}
    try:
        _configure(dict(zip(_CACHE, (str(folder.resolve()), 0.1), strict=True)))
        yield
    finally:
        _configure(before)


def _configure(cache: Mapping[str, object]) -> None:
    for name, value in cache.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it reads its folder once
