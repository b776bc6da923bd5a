"""Packed documents: which tokens count, what is cut, and what is refused."""

import dataclasses
import json
import re
import warnings
from pathlib import Path

import haliax as hax
import jax
import numpy as np
import pytest
from levanter.data.text import (
    ChatLmDatasetFormat,
    DatasetComponent,
    LmDataConfig,
    SupervisedLmDatasetFormat,
    TextLmDatasetFormat,
)
from levanter.schedule import BatchSchedule

from qkvflow.data import DataConfig, FilesSource, check_enough_tokens
from qkvflow.errors import Notice, UserError

Pos = hax.Axis("position", 64)
LENGTHS = (20, 9, 63, 1, 64, 30, 100)  # with the token at a document's end; the last is longer than a sequence
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def component(kind, **settings):
    def record(size):
        text = "a" * (size // 2), "b" * (size - size // 2)
        return {
            "text": {"text": "".join(text)[1:]},
            "prompts": {"input": text[0], "target": text[1][2:]},
            "chat": {"messages": [{"role": r, "content": t} for r, t in zip(("user", "assistant"), text, strict=True)]},
        }[kind]

    sizes = LENGTHS if kind == "text" else [max(size, 4) for size in LENGTHS]
    Path("a.jsonl").write_text("".join(json.dumps(record(size)) + "\n" for size in sizes * 4))
    formats = {
        "text": TextLmDatasetFormat(),
        "prompts": SupervisedLmDatasetFormat(),
        "chat": ChatLmDatasetFormat(chat_template=TEMPLATE, mask_user_turns=False),
    }
    return DatasetComponent(source=FilesSource(train=["a.jsonl"]), format=formats[kind], **settings)


def examples_of(part, blocked, *, by_levanter=False):
    data = DataConfig(components={"c": part}, block_cross_document_attention=blocked).resolve(Path("tokenizer"))
    if by_levanter:
        caches = data.build_caches("train")
        made = LmDataConfig.build_token_datasets(data, caches, Pos, split="train")["c"]
        return made.as_sync_dataset().get_batch(range(6))
    # In the order of the text.
    made = data.build_token_datasets(data.build_caches("train"), Pos, split="train")["c"]
    return made.as_sync_dataset().get_batch(range(6))


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("kind", ["text", "prompts", "chat"])
def test_neither_padding_nor_the_first_token_of_another_document_counts(kind, blocked):
    part = component(kind, pack=True)
    documents = [np.asarray(e.attn_mask.segment_ids[0]) for e in examples_of(part, True, by_levanter=True)]
    levanters = examples_of(part, blocked, by_levanter=True)
    counted = 0
    for own, other, document in zip(examples_of(part, blocked), levanters, documents, strict=True):
        expected = np.array(other.loss_weight)
        for k in range(Pos.size - 1):
            is_inside = document[k] >= 0 and document[k + 1] >= 0
            expected[k] *= is_inside and (document[k] == document[k + 1] or not blocked)
        np.testing.assert_array_equal(own.loss_weight, expected)
        np.testing.assert_array_equal(own.tokens, other.tokens)
        assert (own.attn_mask.segment_ids is None) == (not blocked)
        counted += expected.sum()
    assert 0 < counted < 6 * 63  # something is left, and something is padding


@pytest.mark.parametrize("holds_out", [False, True])
def test_a_long_text_file_is_one_document(holds_out):
    """A stream reads it in pieces, which packing would take for documents."""
    Path("long.txt").write_text("".join(f"{k} words\n" for k in range(20_000)))
    Path("short.txt").write_text("short\n")
    split = {"validation_fraction": 0.4} if holds_out else {"validation": ["long.txt"]}
    source = FilesSource(train=["long.txt", "short.txt"] if holds_out else ["short.txt"], **split)

    def cache(**settings):
        data = DataConfig(components={"c": DatasetComponent(source=source, **settings)}).resolve(Path("tokenizer"))
        return data.build_caches("validation")["c"], data.components["c"].cache_dir

    (packed, folder), (stream, other) = cache(pack=True), cache()
    assert folder != other
    assert len(packed) <= (2 if holds_out else 1) < len(stream)

    def tokens(cache):
        return cache.jagged_array_tree()["input_ids"].data[: cache.flat_field_length("input_ids")].read().result()

    np.testing.assert_array_equal(tokens(packed), tokens(stream))


@pytest.mark.parametrize("pack", [True, 1, 3])
def test_a_notice_says_how_much_of_the_text_is_cut(pack):
    data = DataConfig(components={"c": component("text", pack=pack)}).resolve(Path("tokenizer"))
    total = 4 * sum(LENGTHS)
    with pytest.warns(Notice, match=f"training text of component 'c': 4 of 28 documents.* 64 .*: 144 of {total:,}"):
        assert check_enough_tokens(data, Pos.size).train == {"c": total}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_enough_tokens(data, 100)
    chats = DataConfig(components={"c": component("chat", pack=pack)}).resolve(Path("tokenizer"))
    with pytest.warns(Notice, match=r"tokens are not read\. Raise train_seq_len\.$"):  # chats cannot be a stream
        check_enough_tokens(chats, Pos.size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream = DataConfig(components={"c": component("text")}).resolve(Path("tokenizer"))
        check_enough_tokens(stream, Pos.size)


@pytest.mark.parametrize("kind", ["chat", "prompts"])
def test_answers_of_which_none_is_read_are_refused(kind):
    part = component(kind, pack=True)
    longest = max(Path("a.jsonl").read_text().splitlines(), key=len)  # a prompt of 50 letters, then the answer
    Path("a.jsonl").write_text(f"{longest}\n" * 3)
    if kind == "chat":
        part = dataclasses.replace(part, format=ChatLmDatasetFormat(chat_template=TEMPLATE))
    data = DataConfig(components={"c": part}).resolve(Path("tokenizer"))

    def is_refused(seq_len):
        try:
            check_enough_tokens(data, seq_len)
        except UserError as error:
            return "only answers count, and none of its 3 documents has one within" in str(error)
        return False

    def counts(seq_len):
        sets = data.build_token_datasets(data.build_caches("train"), hax.Axis("position", seq_len), split="train")
        return sets["c"].as_sync_dataset()[0].loss_weight.sum() > 0

    with warnings.catch_warnings(action="ignore"):
        found = [is_refused(seq_len) for seq_len in range(48, 54)]
        assert found == [not counts(seq_len) for seq_len in range(48, 54)]
    assert set(found) == {True, False}


@pytest.mark.parametrize(
    ("kind", "pack", "refused"),
    [
        ("text", "pad", True),
        ("prompts", "pad", True),
        ("chat", "pad", True),
        ("text", -1, True),
        ("chat", False, True),
        ("chat", 0, True),
        ("text", 0, False),
        ("prompts", False, False),
        ("chat", None, False),
    ],
)
def test_packings_that_levanter_does_not_have_are_refused_before_any_work(kind, pack, refused):
    data = DataConfig(components={"c": component(kind, pack=pack)})
    if refused:
        with pytest.raises(UserError, match=re.escape(f"component 'c': `pack: {pack}` is not available")):
            data.resolve(Path("tokenizer"))
        assert not Path("cache").exists()
    else:
        resolved = data.resolve(Path("tokenizer"))
        assert resolved.train_set(Pos, BatchSchedule(4), key=jax.random.PRNGKey(0)).as_sync_dataset()[0] is not None


@pytest.mark.parametrize(("packs", "expected"), [([True], True), ([1, 1], 1), ([1, True], None), ([None, True], None)])
def test_another_text_is_packed_if_all_texts_are(packs, expected):
    parts = {f"c{i}": component("text", pack=pack) for i, pack in enumerate(packs)}
    other = DataConfig(components=parts).evaluating("a.jsonl").components["text"]
    assert isinstance(other, DatasetComponent)
    assert other.pack is expected
