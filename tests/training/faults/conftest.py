"""Fixtures of the tests that inject faults."""

from pathlib import Path

import pytest
from support.training import Training


@pytest.fixture(scope="session")
def training(tmp_path_factory) -> Training:
    return Training(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def undisturbed(training) -> Path:
    """A run of 8 steps that nothing happened to; not to be changed."""
    return training.run("undisturbed")
