"""Log-probabilities over HTTP are the model's, and lm-evaluation-harness finds what it needs in them."""

import asyncio
import contextlib
import tracemalloc

import haliax as hax
import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.utils.tree_utils import inference_mode
from support.serving import END, complete

from qkvflow.generation.logprobs import Logprobs
from qkvflow.generation.sampling import SamplingOptions
from qkvflow.serving import completions
from qkvflow.serving.job import Job, Running
from qkvflow.serving.texts import Texts, _Made

# Of a model whose logits are some tens: fp32, and the server adds its terms in another order.
TOLERANCE = 1e-4
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def expected(model):
    """Tokens -> log-probabilities [position, vocab] of the next token, by the model itself."""

    @jax.jit
    def of(tokens):
        logits = inference_mode(model, True)(hax.named(tokens, ("batch", "position")))
        return jax.nn.log_softmax(logits.rearrange(("batch", "position", "vocab")).array[0])

    def padded(tokens):
        row = np.zeros((1, 64), np.int32)
        row[0, : len(tokens)] = tokens
        return np.asarray(of(jnp.asarray(row)))[: len(tokens)]

    return padded


def score(server, prompts, **options):
    """What lm-evaluation-harness sends, and what it reads."""
    body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    answer = httpx.post(f"{server[0]}/v1/completions", json={**body, "echo": True, **options}, timeout=60)
    assert answer.status_code == 200, answer.text
    return sorted(answer.json()["choices"], key=lambda choice: choice["index"])


def test_scores_of_prompts(server, writer, expected):
    prompts = [writer.tokenizer.encode(text) for text in ("Once upon a time", "The", "for i in range(10):\n")]
    for tokens, choice in zip(prompts, score(server, prompts), strict=True):
        found = choice["logprobs"]
        assert {len(found[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {
            len(tokens) + 1
        }
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        truth = expected(tokens)
        values = found["token_logprobs"][1:-1]
        np.testing.assert_allclose(values, truth[np.arange(len(tokens) - 1), tokens[1:]], atol=TOLERANCE)
        # Greedy agreement is asked for by equality with the largest.
        greedy = [v == max(top.values()) for v, top in zip(values, found["top_logprobs"][1:-1], strict=True)]
        assert greedy == (truth[:-1].argmax(-1) == tokens[1:]).tolist()


def test_greedy_text_is_found_greedy(server, client, writer):
    """What the model itself would write counts as such at every position."""
    text = complete(client, "Once", max_tokens=20, echo=True).choices[0].text
    (choice,) = score(server, [writer.tokenizer.encode(text)])
    told = choice["logprobs"]
    for value, top in list(zip(told["token_logprobs"], told["top_logprobs"], strict=True))[4:-1]:
        assert value == max(top.values())


def test_one_token_is_kept_at_the_end_of_text(server):
    """The answer has the prompt's tokens and one more, even where that ends the text."""
    tokens = [72, 105, 33]
    (choice,) = score(server, [tokens], logit_bias={str(END): 100})
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == "Hi!"
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    (alone,) = score(server, [tokens], logit_bias={str(END): 100}, echo=False)
    assert len(alone["logprobs"]["token_logprobs"]) == 1


def test_batches_change_nothing(server):
    prompts = [[1 + (7 * i + k) % 127 for k in range(3 + 5 * i)] for i in range(9)]
    together = [choice["logprobs"] for choice in score(server, prompts)]
    assert together == [score(server, [prompt])[0]["logprobs"] for prompt in prompts]


def test_words_and_their_tokens_score_alike(server, writer):
    texts = ["Once", "a b"]
    assert score(server, texts) == score(server, [writer.tokenizer.encode(text) for text in texts])


def test_only_what_is_asked_for_is_told(client):
    assert complete(client).choices[0].logprobs is None
    told = complete(client, logprobs=0, max_tokens=8).choices[0].logprobs
    assert len(told.token_logprobs) == 8
    assert [list(top.values()) for top in told.top_logprobs] == [[value] for value in told.token_logprobs]
    told = complete(client, logprobs=5, max_tokens=8, temperature=1.0, seed=1).choices[0].logprobs
    assert {len(top) for top in told.top_logprobs} <= {5, 6}
    assert all(v in top.values() for v, top in zip(told.token_logprobs, told.top_logprobs, strict=True))


def test_offsets_point_into_the_text(client):
    answer = complete(client, "Once upon", echo=True, logprobs=1, max_tokens=20).choices[0]
    told = answer.logprobs
    assert told.text_offset[0] == 0
    for token, at in zip(told.tokens, told.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert answer.text[at:].startswith(token)


def test_streamed_log_probabilities_are_those_of_the_whole(client):
    options = {"prompt": "Once", "echo": True, "logprobs": 2, "max_tokens": 20, "temperature": 1.0, "seed": 3}
    whole = complete(client, **options).choices[0].logprobs
    pieces = [p.choices[0].logprobs for p in complete(client, stream=True, **options)]
    for key in LISTS:
        assert [x for p in pieces if p is not None for x in getattr(p, key)] == getattr(whole, key)


def test_the_prompt_of_a_stream_is_formatted_beside_the_event_loop(client, monkeypatch):
    """Of a long one it takes seconds, in which nobody else would be answered."""
    found = []

    def noting(function):
        def call(*args):
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                found.append(len(str(args)))  # called by the event loop
            return function(*args)

        return call

    monkeypatch.setattr(completions, "logprobs", noting(completions.logprobs))
    monkeypatch.setattr(Texts, "_sent", noting(Texts._sent))
    pieces = list(complete(client, "x" * 300, echo=True, logprobs=5, max_tokens=2, stream=True))
    assert len(pieces[0].choices[0].logprobs.tokens) == 300
    assert 0 < max(found) < 3000


def test_what_is_told_of_a_prompt_takes_little_memory_until_it_is_written():
    """A request may have 128 texts with long prompts, and all are kept until the last one ends."""
    tokens, top, draw = list(range(1025)), 5, np.random.default_rng(0)
    values = -draw.random((1024, 20), np.float32)
    read = Logprobs(-draw.random(1024, np.float32), draw.integers(0, 1000, (1024, 20), np.int32), values)
    job = Job(tokens, 0, SamplingOptions(), (), None, print, top, prompt_logprobs=True)
    tracemalloc.start()
    running, made = Running(job, None, 0), _Made()
    for start in range(0, 1024, 256):
        running.read(Logprobs(*(a[start : start + 256].copy() for a in read)))
    made.add(running.begin())
    del running
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 1024 * 100
    first, *told = made.prompt
    assert (first.token, first.logprob) == (0, None)
    assert [t.token for t in told] == tokens[1:]
    assert [t.logprob for t in told] == read.token.tolist()
    likeliest = [[*zip(*pair, strict=True)] for pair in zip(read.top.tolist(), values.tolist(), strict=True)]
    assert [list(t.top) for t in told] == [row[:top] for row in likeliest]


def test_stop_strings_cut_log_probabilities_too(client):
    whole = complete(client, max_tokens=30, logprobs=0).choices[0]
    stop = whole.text[10:12]
    answer = complete(client, max_tokens=30, logprobs=0, stop=stop).choices[0]
    assert answer.finish_reason == "stop"
    count = len(answer.logprobs.tokens)
    assert "".join(answer.logprobs.tokens) == answer.text
    assert answer.logprobs.token_logprobs == whole.logprobs.token_logprobs[:count]


def test_best_of(client):
    """The likeliest per token of those that are made, the first ones first."""
    options = {"temperature": 1.0, "seed": 9, "max_tokens": 10, "logprobs": 0}
    every = [c.logprobs.token_logprobs for c in complete(client, n=6, **options).choices]
    best = complete(client, n=2, best_of=6, **options)
    ranked = sorted(every, key=lambda values: -sum(values) / len(values))
    assert [c.logprobs.token_logprobs for c in best.choices] == ranked[:2]
    assert [c.index for c in best.choices] == [0, 1]
    assert best.usage.completion_tokens == sum(len(v) for v in every)


def test_best_of_with_a_stop_string_counts_what_was_made(client):
    """The tokens of the stop string count too: a text that ends at once is not the likeliest for that."""
    options = {"temperature": 1.0, "seed": 9, "max_tokens": 6, "logprobs": 0}
    every = complete(client, n=6, **options).choices
    stop = every[0].text[0]  # one at least ends at once
    values = []
    for made in every:
        at = made.text.find(stop)
        end = len(made.logprobs.tokens) if at < 0 else sum(offset <= at for offset in made.logprobs.text_offset)
        values.append(sum(made.logprobs.token_logprobs[:end]) / end)
    best = max(range(6), key=values.__getitem__)
    chosen = complete(client, n=1, best_of=6, stop=stop, **options).choices[0]
    assert chosen.text == every[best].text.split(stop)[0]
    assert min(values) < max(values)


def test_tokenizer(server, writer):
    """`/tokenize`, `/detokenize`, `/tokenizer_info`, at the root."""
    url = server[0]
    info = httpx.get(f"{url}/tokenizer_info").json()
    assert info["eos_token"] == writer.tokenizer.eos_token
    for text in ("Once upon", "é 世界", ""):
        tokens = httpx.post(f"{url}/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        assert tokens == list(writer.tokenizer.encode(text))
        assert httpx.post(f"{url}/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    assert httpx.post(f"{url}/tokenize", json={"prompt": ""}).json()["tokens"] == [256]
    for path, body, param in (
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": [1]}, "prompt"),
        ("detokenize", {"tokens": [10**6]}, "tokens"),
        ("detokenize", {"tokens": "x"}, "tokens"),
        ("detokenize", {}, "tokens"),
    ):
        answer = httpx.post(f"{url}/{path}", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
