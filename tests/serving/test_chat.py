"""Chat: messages as the tokenizer's template writes them, answered in the form of OpenAI's API."""

import openai
import pytest
from support.serving import TEMPLATE, complete, tiny_writer
from transformers import AutoTokenizer

from qkvflow.serving.chat import read
from qkvflow.serving.errors import RequestError
from qkvflow.serving.tokens import tokenizer_info

USER = {"role": "user", "content": "Hi"}
WRITTEN = "<user>Hi\n<assistant>"


def chat(client, messages=(USER,), **options):
    options = {"max_tokens": 12, "temperature": 0, "model": "tiny"} | options
    return client.chat.completions.create(messages=list(messages), **options)


def test_a_chat_is_its_template_continued(client, writer):
    answer = chat(client)
    text = complete(client, writer.tokenizer.encode(WRITTEN), max_tokens=12)
    assert answer.choices[0].message.content == text.choices[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == text.choices[0].finish_reason
    assert answer.usage == text.usage
    assert answer.object == "chat.completion"


def test_stream(client):
    whole = chat(client, n=2, temperature=1.0, seed=2)
    pieces = list(chat(client, n=2, temperature=1.0, seed=2, stream=True, stream_options={"include_usage": True}))
    assert {p.object for p in pieces} == {"chat.completion.chunk"}
    for choice in whole.choices:
        mine = [p.choices[0] for p in pieces if p.choices and p.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        assert mine[-1].finish_reason
    assert pieces[-1].usage == whole.usage


def test_log_probabilities(client, writer):
    told = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    text = complete(client, writer.tokenizer.encode(WRITTEN), max_tokens=12, logprobs=3).choices[0].logprobs
    assert [t.logprob for t in told] == text.token_logprobs
    assert [t.token for t in told] == text.tokens
    assert all(len(t.top_logprobs) == 3 for t in told)
    assert all(bytes(t.bytes).decode(errors="replace") == t.token for t in told if not t.token.startswith("bytes:"))
    assert all(t.top_logprobs == [] for t in chat(client, logprobs=True).choices[0].logprobs.content)


def test_contents_in_parts_and_other_roles(client):
    parts = {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}
    assert chat(client, [parts]).choices[0].message == chat(client).choices[0].message
    messages = [{"role": "system", "content": "Be."}, USER, {"role": "assistant", "content": "Ho"}, USER]
    assert chat(client, messages).usage.prompt_tokens == len("<system>Be.\n<user>Hi\n<assistant>Ho\n" + WRITTEN)


def test_the_type_of_a_message_is_text(writer):
    """lm-evaluation-harness up to 0.4.11 sends it with --apply_chat_template."""
    assert read({"messages": [{**USER, "type": "text"}]}, writer, 512).prompts[0].text == WRITTEN
    for other in ("image", ["text"], True):
        with pytest.raises(RequestError, match=r"messages\[0\]\.type` is not supported"):
            read({"messages": [{**USER, "type": other}]}, writer, 512)


def test_a_developer_is_the_system_for_templates_that_do_not_know_it(model, tmp_path):
    said, known = {"role": "developer", "content": "Be."}, QWEN + "{# developer #}{{ messages[0].role }}"
    for name, template, text in (("a", TEMPLATE, "<system>Be.\n" + WRITTEN), ("b", known, "Be.\nHi\ndeveloper")):
        writer = tiny_writer(model, tmp_path / name, template=template)
        assert read({"messages": [said, USER]}, writer, 512).prompts[0].text == text


def test_limits(client):
    assert chat(client, max_tokens=None, max_completion_tokens=3).usage.completion_tokens <= 3
    with pytest.raises(openai.BadRequestError, match="the same limit"):
        chat(client, max_completion_tokens=3)
    with pytest.raises(openai.BadRequestError, match="maximum context") as caught:
        chat(client, [{"role": "user", "content": "x" * 600}])
    assert caught.value.param == "messages"


def test_what_the_template_does_not_take(client):
    with pytest.raises(openai.BadRequestError, match="The system speaks first"):
        chat(client, [USER, {"role": "system", "content": "late"}])


def test_a_tokenizer_without_a_template(model, tmp_path):
    """Says what to do."""
    writer = tiny_writer(model, tmp_path, template=None)
    with pytest.raises(RequestError, match=r"no chat template.*/v1/completions") as caught:
        read({"messages": [USER]}, writer, 512)
    assert caught.value.code == "no_chat_template"


QWEN = (  # what Qwen's template asks of a response, and Llama's of any message
    "{% for message in messages %}{% if message.role == 'assistant' and not message.tool_calls %}a{% endif %}"
    "{% if 'tool_calls' in message %}t{% endif %}{{ message['content'] }}{{ message.reasoning_content }}\n"
    "{% endfor %}"
)


TRANSFORMERS = (  # what Granite's template asks of its variables, and a loop that ends early
    "{% for message in messages %}{% if message.role == 'assistant' %}{% break %}{% endif %}"
    "{% if thinking %}t{% endif %}{% if 'citations' in controls %}c{% endif %}{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}"
)


@pytest.mark.parametrize("named", [False, True])
def test_a_template_is_read_as_transformers_reads_it(model, tmp_path, named):
    others = [{"name": "tool_use", "template": "{{ nothing.at.all }}"}, {"name": "default", "template": TRANSFORMERS}]
    writer = tiny_writer(model, tmp_path, template=others if named else TRANSFORMERS)
    messages = [USER, {"role": "assistant", "content": "Hey"}, USER]
    text = read({"messages": messages}, writer, 512).prompts[0].text
    assert text == "Hi" + writer.tokenizer.eos_token
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    assert tokenizer_info(writer, 512)["chat_template"] == TRANSFORMERS


def test_a_template_may_ask_for_keys_that_a_message_lacks(model, tmp_path):
    """They are empty, as in transformers; Levanter refuses them."""
    writer = tiny_writer(model, tmp_path, template=QWEN)
    order = read({"messages": [USER, {"role": "assistant", "content": "Hey"}, USER]}, writer, 512)
    assert order.prompts[0].text == "Hi\naHey\nHi\n"
