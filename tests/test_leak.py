"""The leak of the time-indexed fork, as it is shown to readers: it leaks, and its correction does not."""

import math

import pytest

from experiments.leak.__main__ import LeakConfig, Vocab, demonstrate, main


@pytest.mark.slow
def test_only_the_leak_predicts_random_tokens(capsys):
    found = main(LeakConfig(steps=200))
    bound = math.log(Vocab.size)
    assert found[True].loss < bound - 0.5
    assert found[False].loss > bound - 4 * found[False].error
    assert found[True].moved > 0.01
    assert found[False].moved == 0.0
    printed = capsys.readouterr().out
    assert "axes ['position'], all true" in printed
    assert "| no |" in printed


@pytest.mark.slow
def test_the_leak_is_there_before_training():
    assert demonstrate(True, steps=1, seed=0).moved > 1e-4
