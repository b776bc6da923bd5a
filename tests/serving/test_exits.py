"""A server with exits: a request sets the limits of its texts, and they get what they would get alone."""

import concurrent.futures
import dataclasses
import gc
import json
import random

import httpx
import jax
import numpy as np
import pytest
from support.serving import client_of, complete, idle, serving, wait_for

from qkvflow.generation import Drafting
from qkvflow.generation.prepare import PreparedModel
from qkvflow.models.exits import ExitConfig

REQUESTS = 300
ALL, SOME, FEW = 1e9, 1.95, 0.4  # thresholds of this model: all stop after a step, some do, some after two of three


def with_exits(writer, model, drafting=None, **exits):
    own = ExitConfig(**{"rule": "velocity", "threshold": SOME} | exits)
    return dataclasses.replace(writer, prepared=PreparedModel(model, drafting=drafting, exits=own, exits_vary=True))


@pytest.fixture(scope="module")
def leaving(model, writer):
    """(client, scheduler) of a server whose texts exit by default."""
    with serving(with_exits(writer, model), slots=2) as (url, scheduler):
        yield client_of(url), scheduler
        wait_for(lambda: idle(scheduler))


def scores(client, **exits):
    """Log-probabilities of a prompt, its text after it."""
    body = exits and {"extra_body": exits}
    choice = complete(client, prompt="Once upon a time", max_tokens=20, echo=True, logprobs=1, **body).choices[0]
    return choice.logprobs.token_logprobs[1:], choice.text


def test_a_request_sets_its_limits(leaving, client):
    """None, the server's own spelled out, and others; null is the server's own, like any field that is null."""
    ours, _ = leaving
    full = scores(client)
    own = scores(ours)
    assert not np.allclose(own[0], full[0], atol=1e-3)
    assert own == scores(ours, exit=None) == scores(ours, exit={}) == scores(ours, exit={"threshold": SOME})
    assert own == scores(ours, exit={"rule": "velocity", "threshold": None, "min_steps": 1})
    none = scores(ours, exit=False)
    assert none == scores(ours, exit={"threshold": 0})
    assert none[1] == full[1]
    np.testing.assert_allclose(none[0], full[0], rtol=1e-4, atol=1e-4)
    early, later = (scores(ours, exit={"threshold": ALL, "min_steps": n})[0] for n in (1, 2))
    assert early != later
    assert not np.allclose(early, none[0], atol=1e-3)


def test_chat_has_it_too(leaving):
    def told(**body):
        body |= {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "temperature": 0}
        body |= {"logprobs": True, "model": "tiny"}
        answer = httpx.post(f"{leaving[0].base_url}chat/completions", json=body, timeout=60).json()
        return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]

    assert told() == told(exit={"threshold": SOME})
    assert told(exit=False) != told(exit={"threshold": ALL})


WRONG = [
    (True, "exit", "or false"),
    ("kl", "exit", "or false"),
    ([0.1], "exit", "or false"),
    ({"threshold": -0.1}, "exit.threshold", "at least 0"),
    ({"threshold": float("nan")}, "exit.threshold", "at least 0"),
    ({"threshold": float("inf")}, "exit.threshold", "at least 0"),
    ({"threshold": 10**400}, "exit.threshold", "at least 0"),
    ({"threshold": "0.1"}, "exit.threshold", "at least 0"),
    ({"threshold": True}, "exit.threshold", "at least 0"),
    ({"min_steps": 0}, "exit.min_steps", "at least 1"),
    ({"min_steps": 3}, "exit.min_steps", "from 1, the server's own (--exit), to 2"),
    ({"min_steps": 1.5}, "exit.min_steps", "whole number"),
    ({"rule": "kl"}, "exit.rule", "This server's rule is velocity (--exit)"),
    ({"rule": "word"}, "exit.rule", "Leave it out, or use velocity"),
    ({"rule": 1}, "exit.rule", "must be a text"),
    ({"limit": 1}, "exit.limit", "Supported: rule, threshold, min_steps"),
]


def refusal(client, value):
    body = json.dumps({"prompt": "a", "max_tokens": 1, "exit": value})
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{client.base_url}completions", content=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    return error["param"], error["message"]


@pytest.mark.parametrize(("value", "param", "words"), WRONG, ids=lambda v: f"{v!r:.30}")
def test_a_wrong_value_is_named(leaving, value, param, words):
    named, message = refusal(leaving[0], value)
    assert named == param
    assert f"`{param}`" in message
    assert words in message


@pytest.mark.parametrize("value", [False, {}, {"threshold": 0.1}])
def test_a_server_without_exits_says_so(client, value):
    named, message = refusal(client, value)
    assert named == "exit"
    assert "has no exits (--exit)" in message
    assert "Leave it out" in message


def test_the_least_steps_are_the_servers(writer, model):
    """Whose program asks nothing of the rule before; and with a threshold of 0 only those exit who want to."""
    with serving(with_exits(writer, model, threshold=0.0, min_steps=2)) as (url, _):
        client = client_of(url)
        assert refusal(client, {"min_steps": 1}) == (
            "exit.min_steps",
            "`exit.min_steps` must be a whole number from 2, the server's own (--exit), to 2, one below the steps of"
            " the model; got 1.",
        )
        assert scores(client) == scores(client, exit=False)
        assert scores(client)[0] != scores(client, exit={"threshold": ALL})[0]


def request(i):
    """Of many kinds: greedy and drawn, streams, log-probabilities, several texts, and limits of all kinds."""
    draw = random.Random(i)
    body = {"prompt": "word " * draw.randrange(60), "max_tokens": 1 + draw.randrange(40), "seed": i}
    body |= {"temperature": draw.choice((0, 1.0, 0.7)), "n": draw.choice((1, 1, 2)), "stream": draw.random() < 0.3}
    extra = draw.choice(({}, {"top_k": 5}, {"exit": None}))
    exits = (False, {"threshold": 0}, {"threshold": ALL}, {"threshold": FEW}, {"threshold": 1, "min_steps": 2})
    extra = {"exit": draw.choice(exits), **extra} if draw.random() < 0.8 else extra
    body |= draw.choice(({}, {"stop": "e"}, {"logprobs": 2}, {"top_p": 0.8}, {"logit_bias": {"101": -5}}))
    return {**body, "extra_body": extra}


def answer(client, body):
    told = complete(client, **body)
    texts, reasons, logprobs = {}, {}, {}
    for piece in told if body["stream"] else [told]:
        for c in piece.choices:
            texts[c.index] = texts.get(c.index, "") + c.text
            reasons[c.index] = c.finish_reason or reasons.get(c.index)
            if c.logprobs is not None:
                logprobs.setdefault(c.index, []).extend(c.logprobs.token_logprobs)
    return texts, reasons, logprobs


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
def test_mixed_requests_get_what_they_get_alone(model, writer, drafts):
    """300 requests, 24 at once, each with its own exits (and drafts): the answers are those alone, memory returns."""

    def asked(i):
        body = request(i)
        if drafts:
            body["extra_body"]["draft_tokens"] = (None, 0, 1, 2, 3)[i % 5]
        return body

    drafting = Drafting(2, 3) if drafts else None
    with serving(with_exits(writer, model, drafting), max_waiting=512) as (url, scheduler):
        client = client_of(url)
        alone = [answer(client, asked(i)) for i in range(REQUESTS)]
        gc.collect()
        before = sum(a.nbytes for a in jax.live_arrays()), len(jax.live_arrays())
        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            together = list(pool.map(lambda i: answer(client, asked(i)), range(REQUESTS)))
        wait_for(lambda: idle(scheduler))
        gc.collect()
        after = sum(a.nbytes for a in jax.live_arrays()), len(jax.live_arrays())
    assert together == alone
    assert after[0] <= before[0] * 1.05
    assert after[1] <= before[1] * 1.05
    full = [i for i in range(REQUESTS) if asked(i)["extra_body"].get("exit") is False]
    assert len(full) > REQUESTS / 20, "texts of the full depth must be among them"
