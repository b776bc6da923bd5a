"""Outside the block a study's compilation cache is neither read nor written."""

import jax
import jax.numpy as jnp

from experiments.at_work import at_work


def _compiles() -> None:
    """A program that takes more than 0.1 s to compile."""
    jax.clear_caches()

    @jax.jit
    def many(x):
        for _ in range(500):
            x = jnp.sin(x) @ x
        return x

    many(jnp.eye(4)).block_until_ready()


def test_the_cache_of_a_study_is_its_own(tmp_path, capfd):
    before = jax.config.jax_compilation_cache_dir
    with at_work(tmp_path / "outer"):
        with at_work(tmp_path / "inner"):
            _compiles()
        assert jax.config.jax_compilation_cache_dir == str((tmp_path / "outer" / "compiled").resolve())
        _compiles()
    assert jax.config.jax_compilation_cache_dir == before
    made = [sorted((tmp_path / name / "compiled").iterdir()) for name in ("outer", "inner")]
    assert all(made)
    _compiles()
    assert made == [sorted((tmp_path / name / "compiled").iterdir()) for name in ("outer", "inner")]
    assert capfd.readouterr().err == ""
