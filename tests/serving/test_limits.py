"""Work is bounded before it is done, and done beside the event loop: a large request costs others nothing."""

import concurrent.futures
import json
import time
from types import SimpleNamespace

import httpx
import pytest
from support.serving import complete
from support.tokenizers import byte_level

from qkvflow import serve_lm
from qkvflow.errors import UserError
from qkvflow.generation.text import clearly_longer

MIB = 2**20


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer):
        self._tokenizer, self.read = tokenizer, 0

    def encode(self, text, **options):
        self.read += len(text)
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def test_a_long_text_is_not_read_to_its_end(tmp_path):
    """1.9 MB for a context of 128 tokens: refused after a few thousand characters, whatever they are."""
    tokenizer = Counting(byte_level(tmp_path))
    for text in ("word " * 380_000, "x" * 1_900_000, "世" * 600_000, " " * 1_900_000, "\ud800" * 10**6):
        tokenizer.read = 0
        assert clearly_longer(tokenizer, text, 128)
        assert tokenizer.read < 10_000
    for text in ("", "word " * 20, "x" * 128):
        assert not clearly_longer(tokenizer, text, 128)


def test_texts_that_fit_are_never_refused(tmp_path):
    """Whatever the number of characters to a token: who is not sure says no."""

    class Words:
        def encode(self, text):
            return text.split()

    for length in (100, 1000):
        assert not clearly_longer(Words(), "a" * 50_000 + " " + "b" * 50_000, length)
        assert not clearly_longer(Words(), " ".join(["longword" * 20] * (length - 1)), length)
        assert clearly_longer(Words(), " ".join(["longword" * 20] * (20 * length)), length)


LARGE = {
    "tokens": {"prompt": [1] * 500_000},
    "a text": {"prompt": "word " * 200_000},
    "lists of tokens": {"prompt": [[1] * 4000] * 128},
    "texts": {"prompt": ["x" * 8000] * 128},
    "messages": {"messages": [{"role": "user", "content": "x" * 1000}] * 1000},
}


@pytest.mark.parametrize("what", LARGE)
def test_large_requests_do_not_hold_up_others(server, client, what):
    """Eight at once: each is refused, and what asks for little meanwhile waits for none of them."""
    url = server[0]
    path = "chat/completions" if what == "messages" else "completions"
    body = json.dumps(LARGE[what]).encode()
    assert MIB / 4 < len(body) < 2 * MIB
    waits, started = [], time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        post = lambda: httpx.post(  # noqa: E731
            f"{url}/v1/{path}", content=body, headers={"Content-Type": "application/json"}, timeout=60
        )
        large = [pool.submit(post) for _ in range(8)]
        while not all(f.done() for f in large):
            began = time.monotonic()
            assert httpx.get(f"{url}/health").status_code == 200
            waits.append(time.monotonic() - began)
    for answer in large:
        assert answer.result().status_code in (400, 413)
    took = time.monotonic() - started  # long where the machine is busy, and so is every wait
    assert max(waits) < max(1.0, took / 2), "the event loop was not free"
    assert complete(client, max_tokens=1).choices[0].finish_reason


@pytest.mark.parametrize(
    ("wanted", "longest", "is_cached", "length"),
    [
        (None, 32768, True, 32768),
        (None, 32768, False, 1024),
        (4096, 32768, False, 4096),
        (None, 512, False, 512),
    ],
)
def test_the_length_of_texts(wanted, longest, is_cached, length):
    """Without a cache every token takes a pass over all of it: the default is short, and that is said."""
    said, writer = [], SimpleNamespace(prepared=SimpleNamespace(max_seq_len=longest, is_cached=is_cached))
    assert serve_lm._length(wanted, writer, SimpleNamespace(say=said.append)) == length
    assert bool(said) == (wanted is None and length < longest)
    with pytest.raises(UserError, match=f"between 2 and {longest}"):
        serve_lm._length(longest + 1, writer, SimpleNamespace(say=said.append))


@pytest.mark.parametrize("run", ["gs://bucket/run", "nowhere/run", "run"])
def test_a_log_that_the_run_cannot_hold_goes_elsewhere(tmp_path, monkeypatch, run):
    """Clients that get status 500 are told to look into it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    said, logs = [], []

    def log_to(path):
        path.open("ab").close()
        logs.append(path)

    serve_lm._log(SimpleNamespace(log_to=log_to), run, SimpleNamespace(say=said.append))
    (log,) = logs
    assert log.is_file()
    if run == "run":
        assert log.samefile("run/serve.log")
        assert not said
    else:
        log.unlink()
        assert said == [f"{run} cannot hold the server's log, so it is {log}"]
