"""A server that drafts: a request says how much, is told what came of it, and gets what it would get alone."""

import concurrent.futures
import dataclasses
import gc
import random

import httpx
import jax
import pytest
from support.serving import client_of, complete, idle, serving, wait_for

from qkvflow.generation import Drafting
from qkvflow.generation.prepare import PreparedModel

REQUESTS = 300


@pytest.fixture(scope="module")
def drafted(model, writer):
    """(client, scheduler) of a server that drafts up to 3 tokens at 2 of 3 steps."""
    prepared = PreparedModel(model, drafting=Drafting(2, 3))
    with serving(dataclasses.replace(writer, prepared=prepared), slots=2) as (url, scheduler):
        yield client_of(url), scheduler
        wait_for(lambda: idle(scheduler))


def test_a_request_says_how_much(drafted, client):
    """As many as the server drafts, fewer or none: the same greedy text, with its log-probabilities, as without."""
    (ours, scheduler), options = drafted, {"prompt": "Once", "max_tokens": 60, "temperature": 0, "logprobs": 2}
    plain = complete(client, **options)
    told = []
    for asked in ({"draft_steps": 2}, {"draft_tokens": 1}, {"draft_tokens": 0}, {"draft_steps": 0, "draft_tokens": 2}):
        answer = complete(ours, **options, extra_body=asked)
        assert answer.choices[0].text == plain.choices[0].text
        assert answer.choices[0].logprobs.tokens == plain.choices[0].logprobs.tokens
        assert answer.choices[0].logprobs.token_logprobs == pytest.approx(
            plain.choices[0].logprobs.token_logprobs, abs=1e-4
        )
        details = answer.usage.completion_tokens_details
        told.append((details.accepted_prediction_tokens, details.rejected_prediction_tokens))
    assert sum(told[0]) > sum(told[1]) > sum(told[2]) == sum(told[3]) == 0
    assert plain.usage.completion_tokens_details is None
    assert scheduler.load()["drafting"]["accepted"] >= told[0][0]
    health = httpx.get(str(ours.base_url).replace("/v1/", "/health")).json()
    assert health["drafting"]["proposed"] >= sum(told[0])


def test_a_stop_string_among_drafts(drafted, client):
    """A stop string that ends in the middle of what a pass adds ends the text there."""
    text = complete(client, prompt="Once", max_tokens=60, temperature=0).choices[0].text
    for at in (5, 6, 7, 8):
        options = {"prompt": "Once", "max_tokens": 60, "temperature": 0, "stop": text[at : at + 2], "stream": True}
        pieces = [[piece.choices[0] for piece in complete(c, **options)] for c in (drafted[0], client)]
        ours, theirs = ("".join(c.text for c in made) for made in pieces)
        assert ours == theirs
        assert pieces[0][-1].finish_reason == "stop"


def test_refusals(drafted, client):
    import openai

    for server, field, value, words in (
        (drafted[0], "draft_tokens", 4, "drafts up to 3"),
        (client, "draft_tokens", 1, "does not draft"),
        (drafted[0], "draft_steps", 1, "drafts at 2 steps"),
        (client, "draft_steps", 2, "does not draft"),
    ):
        with pytest.raises(openai.BadRequestError, match=words) as error:
            complete(server, prompt="a", max_tokens=1, extra_body={field: value})
        assert error.value.param == field


@pytest.mark.slow
def test_mixed_requests_get_what_they_get_alone(drafted):
    """300 requests, 24 at once, greedy and drawn, drafted and not: the texts are those alone, and memory returns."""
    client, scheduler = drafted

    def answer(i):
        draw = random.Random(i)
        body = {"prompt": "word " * draw.randrange(60), "max_tokens": 1 + draw.randrange(40), "seed": i}
        body |= {"temperature": draw.choice((0, 1.0, 0.7)), "n": draw.choice((1, 1, 2))}
        body |= draw.choice(({}, {"stop": "e"}, {"logprobs": 2}, {"extra_body": {"top_k": 5}}))
        body["extra_body"] = {**body.get("extra_body", {}), "draft_tokens": draw.choice((None, 0, 1, 2, 3))}
        return [(c.text, c.finish_reason) for c in complete(client, **body).choices]

    alone = [answer(i) for i in range(REQUESTS)]
    gc.collect()
    before = sum(a.nbytes for a in jax.live_arrays())
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        together = list(pool.map(answer, range(REQUESTS)))
    wait_for(lambda: idle(scheduler))
    gc.collect()
    assert together == alone
    assert sum(a.nbytes for a in jax.live_arrays()) <= before * 1.05
