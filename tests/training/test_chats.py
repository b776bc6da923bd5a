"""A training on chats: its run keeps the template that formatted them."""

import json

import pytest
from support.training import Training
from transformers import AutoTokenizer

from qkvflow.eval_lm import EvalConfig
from qkvflow.eval_lm import main as evaluate
from qkvflow.runs import load_run

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
OTHER = "{{ 'other' }}" + TEMPLATE


@pytest.mark.parametrize(
    ("format", "rest", "kept"),
    [
        ({}, {"chat_template": TEMPLATE}, TEMPLATE),
        ({"chat_template": TEMPLATE}, {}, TEMPLATE),
        ({"chat_template": TEMPLATE}, {"chat_template": OTHER}, OTHER),
    ],
    ids=["of the data", "of the component", "both"],
)
def test_the_template_is_the_runs(tmp_path, capsys, format, rest, kept):
    training, file = Training(tmp_path), tmp_path / "chats.jsonl"
    roles = ("user", "What?"), ("assistant", "It is this. " * 2)
    chats = ([{"role": role, "content": f"{i} {text}"} for role, text in roles] for i in range(40))
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    source = {"type": "files", "train": [str(file)], "validation_fraction": 0.2, "text_key": None}
    component = {"source": source, "format": {"type": "chat"} | format, "pack": True}
    data = {"cache_dir": str(tmp_path / "cache"), "components": {"chats": component}} | rest
    run = training.run("chats", 2, data=data)
    caches = sorted((tmp_path / "cache").iterdir())
    assert load_run(run).tokenizer.chat_template == kept
    assert AutoTokenizer.from_pretrained(str(run / "tokenizer")).chat_template == kept
    assert evaluate(EvalConfig(run=str(run)))[0].loss > 0
    assert sorted((tmp_path / "cache").iterdir()) == caches
