"""Fields of requests: served, accepted because they ask for nothing, or refused by name. None is ignored."""

import json

import httpx
import openai
import pytest
from support.serving import complete, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def post(server, path=COMPLETIONS, **body):
    given = {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
    return httpx.post(server[0] + path, json={**given, "max_tokens": 2, "temperature": 0, **body}, timeout=60)


WRONG = [
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 2.5),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("max_tokens", 10**30),
    ("n", 0),
    ("n", 1000),
    ("stop", ""),
    ("stop", [1]),
    ("stop", ["x"] * 17),
    ("seed", 1.5),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("stream_options", "x"),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"3": 101}),
    ("logit_bias", {"100000": 1}),
    ("logit_bias", {str(i): 1 for i in range(301)}),
    ("control", [1]),
    ("control", [1e300] * 3),
    ("control", "x"),
    ("control", [[0.0, 0.0]] * 600),
    ("control", [10**400, 0]),
    ("control", ["1", "2"]),
    ("control", [True, False]),
    ("max_tokens", int("9" * 4300)),
    ("n", int("9" * 4300)),
    ("draft_tokens", int("9" * 4300)),
    ("frequency_penalty", 0.5),
    ("min_p", 0.1),
    ("service_tier", "priority"),
    ("never_heard_of", 1),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda v: f"{v!r:.20}")
def test_a_wrong_field_is_named(server, path, name, value):
    answer = post(server, path, **{name: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == name
    assert name in error["message"]


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (COMPLETIONS, "prompt", {}),
        (COMPLETIONS, "prompt", []),
        (COMPLETIONS, "prompt", ["a", [-1]]),
        (COMPLETIONS, "prompt", [[True]]),
        (COMPLETIONS, "prompt", [10**9]),
        (COMPLETIONS, "prompt", ["a"] * 200),
        (COMPLETIONS, "logprobs", 21),
        (COMPLETIONS, "logprobs", True),
        (COMPLETIONS, "best_of", 0),
        (COMPLETIONS, "best_of", 129),
        (COMPLETIONS, "suffix", "end"),
        (COMPLETIONS, "echo", 1),
        (COMPLETIONS, "messages", MESSAGES),
        (CHAT, "prompt", "a"),
        (CHAT, "messages", []),
        (CHAT, "messages", "Hi"),
        (CHAT, "logprobs", 5),
        (CHAT, "top_logprobs", 5),
        (CHAT, "max_completion_tokens", -1),
        (CHAT, "tools", [{"type": "function"}]),
        (CHAT, "response_format", {"type": "json_object"}),
    ],
    ids=lambda v: f"{v!r:.20}",
)
def test_a_wrong_field_of_one_kind_is_named(server, path, name, value):
    answer = post(server, path, **{name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


def test_parts_of_fields_are_named(server):
    for options, param in (
        ({"include_usage": 1}, "stream_options.include_usage"),
        ({"include_obfuscation": True}, "stream_options.include_obfuscation"),
        ({"other": 1}, "stream_options.other"),
    ):
        assert post(server, stream=True, stream_options=options).json()["error"]["param"] == param
    for message, param in (
        ("Hi", "messages[0]"),
        ({"role": "pirate", "content": "a"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": "a", "tool_calls": [1]}, "messages[0].tool_calls"),
    ):
        assert post(server, CHAT, messages=[message]).json()["error"]["param"] == param


def test_what_asks_for_nothing_is_accepted(server):
    expected = post(server).json()["choices"]
    for name in ("frequency_penalty", "presence_penalty", "min_p", "repetition_penalty", "suffix", "best_of", "stop"):
        assert post(server, **{name: None}).json()["choices"] == expected
    harmless = {"user": "me", "store": True, "metadata": {"a": "b"}, "safety_identifier": "x", "never_heard_of": None}
    idle = {"frequency_penalty": 0, "presence_penalty": 0.0, "min_p": 0, "suffix": "", "service_tier": "auto"}
    assert post(server, **harmless, **idle, top_k=-1, top_p=1).json()["choices"] == expected
    assert post(server, CHAT, **harmless, tools=[], tool_choice="auto", logprobs=False).status_code == 200


def test_no_limit_on_k(client):
    """-1 and 0, as for other servers: what is drawn is what is drawn without it."""
    options = {"temperature": 1.0, "seed": 4, "max_tokens": 12}
    expected = complete(client, **options).choices[0].text
    for k in (-1, 0, None):
        assert complete(client, extra_body={"top_k": k}, **options).choices[0].text == expected
    assert complete(client, extra_body={"top_k": 1}, **options).choices[0].text != expected


def test_bias(client):
    """Of 100 makes a token certain."""
    answer = complete(client, max_tokens=5, logit_bias={"88": 100}).choices[0]
    assert answer.text == "XXXXX"
    assert (
        complete(client, max_tokens=5, logit_bias={}).choices[0].text == complete(client, max_tokens=5).choices[0].text
    )


def test_more_texts_than_there_is_room_for(writer):
    """What can never be kept is no matter of a moment; free slots count."""
    with serving(writer, max_waiting=4, slots=2) as (url, scheduler):
        ask = {"prompt": "a", "max_tokens": 2}
        assert scheduler.capacity == 6
        for n, status in ((5, 200), (6, 200), (7, 400)):
            answer = httpx.post(f"{url}/v1/completions", json={**ask, "n": n}, timeout=60)
            assert answer.status_code == status
        assert answer.json()["error"]["param"] == "n"
        assert (
            httpx.post(f"{url}/v1/completions", json={**ask, "prompt": ["a"] * 7}).json()["error"]["param"] == "prompt"
        )


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, {"\ud800": 1}, 400),
        (COMPLETIONS, {"model": "\ud800"}, 404),
        (COMPLETIONS, {"stream": True, "stream_options": {"\ud800": 1}}, 400),
        (COMPLETIONS, {"exit": {"\ud800": 1}}, 400),
        (CHAT, {"messages": [{"role": "user", "content": "a", "\ud800": 1}]}, 400),
    ],
)
def test_texts_that_utf8_does_not_have_are_told_back(server, path, body, status):
    given = {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
    with httpx.Client(base_url=server[0], timeout=60) as client:
        headers = {"Content-Type": "application/json"}
        answer = client.post(path, content=json.dumps(given | body), headers=headers)
        assert answer.status_code == status
        assert "\\ud800" in answer.json()["error"]["message"]
        assert client.get("/v1/models").status_code == 200  # on the same connection


def test_null_is_absent(client):
    lengths = [complete(client, "Once", **given).usage.completion_tokens for given in ({"max_tokens": None}, {})]
    assert lengths[0] == lengths[1] <= 16


def test_nothing_to_make(client):
    """max_tokens 0 gives the prompt back where echo asks for it."""
    answer = complete(client, "Once", max_tokens=0, echo=True)
    assert answer.choices[0].text == "Once"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    assert complete(client, "Once", max_tokens=0).choices[0].text == ""


def test_context(client, writer):
    for prompt, param in (("x" * 600, "prompt"), ([5] * 512, "prompt"), ("x" * 500, "max_tokens")):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, prompt, max_tokens=20)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
