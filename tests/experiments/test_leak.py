"""The leak of the time-indexed fork, as it is shown to readers: it leaks, and its correction does not."""

import math

import pytest

from experiments.leak.__main__ import STUDY, LeakConfig, Vocab, demonstrate


@pytest.mark.slow
def test_only_the_leak_predicts_random_tokens(tmp_path, capsys):
    found = STUDY.carry_out(LeakConfig(steps=200, output=str(tmp_path)))
    leak, causal = (found.models[name] for name in ("one name for both axes", "two names (causal)"))
    bound = math.log(Vocab.size)
    assert leak.loss < bound - 0.5
    assert causal.loss > bound - 4 * causal.error
    assert leak.moved > 0.01
    assert causal.moved == 0.0
    page = (tmp_path / "results.md").read_text()
    assert "axes ['position'], all true" in page
    assert "| no |" in page
    assert page in capsys.readouterr().out


@pytest.mark.slow
def test_the_leak_is_there_before_training():
    assert demonstrate(True, steps=1, seed=0).moved > 1e-4
