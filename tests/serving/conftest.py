"""One server for all tests of this folder: its start takes longer than most of them."""

import pytest
from support.serving import client_of, idle, serving, tiny_model, tiny_writer, wait_for


@pytest.fixture(scope="session")
def model():
    return tiny_model()


@pytest.fixture(scope="session")
def writer(model, tmp_path_factory):
    return tiny_writer(model, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def server(writer):
    """(address, scheduler)"""
    with serving(writer, max_body_bytes=2**20) as (url, scheduler):
        yield url, scheduler


@pytest.fixture(scope="session")
def client(server):
    return client_of(server[0])


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After each test all slots are free and nobody waits."""
    yield
    if "server" in request.fixturenames:
        wait_for(lambda: idle(request.getfixturevalue("server")[1]))
