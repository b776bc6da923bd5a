"""Text from tokens while they come: no broken characters, nothing behind a stop string, nothing lost."""

import io
import random
import re
import sys

import pytest
from support.tokenizers import byte_fallback, byte_level

from qkvflow.analysis.opening import labels
from qkvflow.errors import UserError
from qkvflow.generation.prompts import read_prompts, stop_strings
from qkvflow.generation.text import Continuation, StopStrings, TextStream, encode_prompt
from qkvflow.generation.vocabulary import Vocabulary

KINDS = ("byte", "llama", "mistral", "gemma")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    fallback = {kind: byte_fallback(folder / kind, kind) for kind in KINDS[1:]}
    return {"byte": byte_level(folder / "byte"), **fallback}


@pytest.fixture(scope="module")
def tokenizer(tokenizers):
    return tokenizers["byte"]


def pieces_of(tokenizer, ids, prompt=()):
    stream = TextStream(tokenizer, prompt)
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_tokens_are_what_they_add(tokenizers, kind):
    """Together the text, but for bytes that are no character on their own; llama's decoder drops a first space."""
    tokenizer, text = tokenizers[kind], "see there é Ж"
    found = labels(tokenizer, tokenizer.encode(text))
    together = re.sub(rb"\\x([0-9A-F]{2})", lambda byte: bytes([int(byte[1], 16)]), "".join(found).encode())
    assert together.decode() == text
    assert any(one.startswith(" ") for one in found)


TEXT = "Grüße, 世界! 👩‍🚀 naïve — ‰ " * 5


def test_characters_come_whole(tokenizer):
    """One byte per token: no piece may show half a character, and nothing may be missing."""
    pieces = pieces_of(tokenizer, tokenizer.encode(TEXT))
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) == len(TEXT), "each character comes as soon as it is complete"


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_is_read_is_written(tokenizers, kind):
    """Characters that are in no vocabulary come back, whole, and what stands behind them too."""
    tokenizer = tokenizers[kind]
    for text in ("see 世界 there", TEXT, "a  two ", "�", "é" * 40):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text, "the tokenizer of this test must not lose anything itself"
        assert "".join(pieces_of(tokenizer, ids)) == text
        begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        assert "".join(pieces_of(tokenizer, ids, begin)) == text, "a begin-of-text token puts no space in front"


@pytest.mark.parametrize("kind", KINDS)
def test_continuing_a_prompt_gives_the_rest_only(tokenizers, kind):
    tokenizer = tokenizers[kind]
    text = TEXT + "see 世界 there"
    ids = tokenizer.encode(text)
    for cut in range(1, len(text) - 1):
        prompt = tokenizer.encode(text[:cut])
        if ids[: len(prompt)] == prompt:
            assert "".join(pieces_of(tokenizer, ids[len(prompt) :], prompt)) == text[cut:]


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokens_at_all(tokenizers, kind):
    """Whatever a model writes, the pieces are what the tokenizer makes of the whole, wherever the prompt ends."""
    vocabulary = Vocabulary(tokenizers[kind])
    draw, bytes_ = random.Random(0), [i for i in range(len(vocabulary)) if len(vocabulary.name(i)) != 1]
    checked = 0
    for trial in range(400):
        pool = bytes_ if trial % 2 else range(len(vocabulary))
        ids = [draw.choice(pool) for _ in range(draw.randrange(90))]
        ids = [i for i in ids if i != vocabulary.tokenizer.bos_token_id]
        cut = draw.randrange(len(ids) + 1)
        if cut and vocabulary.is_fallback(ids[cut - 1]):
            continue  # bytes that were whole characters in the prompt may be broken by what follows
        stream = TextStream(vocabulary, ids[:cut])
        prompt = vocabulary.decode(ids[:cut])
        prompt = prompt[: len(prompt) - stream.held]
        pieces = [*(stream.push(i) for i in ids[cut:]), stream.finish()]
        assert prompt + "".join(pieces) == vocabulary.decode(ids)
        checked += 1
    assert checked > 50


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_ends_within_a_character(tokenizers, kind):
    """The character belongs to the continuation, once: as itself, or broken."""
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("ab界 there")
    start = len(tokenizer.encode("ab"))
    for cut in (start + 1, start + 2):
        stream = TextStream(tokenizer, ids[:cut])
        assert stream.held > 0
        assert "".join([*(stream.push(i) for i in ids[cut:]), stream.finish()]) == "界 there"
        stream = TextStream(tokenizer, ids[:cut])
        assert set("".join([*(stream.push(i) for i in tokenizer.encode("ab")), stream.finish()])) >= {"\ufffd", "a"}


def test_text_comes_as_soon_as_it_is_sure(tokenizers):
    """With byte fallback: text at once, bytes with the next token of text."""
    tokenizer = tokenizers["llama"]
    ids = tokenizer.encode("see 界 there")
    assert pieces_of(tokenizer, ids) == ["see", " ", "", "", "", "界 there", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_tokens(tokenizers, kind):
    """No two tokens of text have one name; their bytes are those of the text."""
    vocabulary = Vocabulary(tokenizers[kind])
    text = "see 世界 there"
    ids = vocabulary.tokenizer.encode(text)
    written = b"".join(vocabulary.bytes(i) for i in ids).decode()
    assert written.removeprefix(" ") == text
    assert "bytes:\\xe7" in [vocabulary.name(i) for i in ids]
    names = [vocabulary.name(i) for i in range(len(vocabulary)) if not vocabulary.is_fallback(i)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("cut", range(1, 8))
def test_stop_strings_across_pieces(cut):
    text = "aab aabaac END more"
    for stops, expected in (
        (["aac"], "aab aab"),
        (["END", "aac"], "aab aab"),
        (["zz"], text),
        (["aab"], ""),
        ([], text),
    ):
        watch, shown, stopped = StopStrings(stops), "", False
        for at in range(0, len(text), cut):
            piece, stopped = watch.push(text[at : at + cut])
            shown += piece
            if stopped:
                break
        assert shown + ("" if stopped else watch.finish()) == expected
        assert stopped == (expected != text)


def test_reasons(tokenizer):
    def run(ids, stops=(), end=()):
        text = Continuation(tokenizer, [65], stops, end)
        shown = ""
        for n, i in enumerate(ids):
            shown += text.push(i, n == len(ids) - 1)
            if text.reason is not None:
                break
        return shown, text.reason, text.tokens

    assert run(b"hello") == ("hello", "length", 5)
    assert run(b"hello", ["ll"]) == ("he", "stop", 4)
    assert run([104, 105, 256, 104], end=[256]) == ("hi", "stop", 3)
    assert run(b"abE", ["END"]) == ("abE", "length", 3), "the beginning of a stop string is text after all"
    assert run([97, 0xC3]) == ("a\ufffd", "length", 2), "half a character at the very end is shown as broken"


def test_prompts(tokenizer):
    assert encode_prompt(tokenizer, "hé") == list("hé".encode())
    assert encode_prompt(tokenizer, "") == [256], "an empty prompt begins a document: after the end of the one before"
    with pytest.raises(UserError, match="UTF-8"):
        encode_prompt(tokenizer, "\udcff")


def test_sources_of_prompts(tmp_path):
    assert [p.text for p in read_prompts("a: b", None)] == ["a: b"]
    assert [p.text for p in read_prompts(None, None, io.StringIO("two\nlines\n"))] == ["two\nlines"]
    lines = tmp_path / "p.txt"
    lines.write_text("one\n\ntwo\n")
    assert [p.text for p in read_prompts(None, str(lines))] == ["one", "two"]
    records = tmp_path / "p.jsonl"
    records.write_text('{"prompt": "one"}\n{"prompt": "two", "control": [1, 2]}\n')
    assert [(p.text, p.control) for p in read_prompts(None, str(records))] == [("one", None), ("two", [1, 2])]
    for text in ("\ufeffone\r\n\ftwo\u2028three\x85\x1cfour\n", "one\n\ftwo\u2028three\x85\x1cfour"):
        lines.write_bytes(text.encode())
        assert [p.text for p in read_prompts(None, str(lines))] == ["one", "\ftwo\u2028three\x85\x1cfour"]
    records.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n{"prompt": "c"}'.encode())
    assert [p.text for p in read_prompts(None, str(records))] == ["a\u2028b", "c"]
    assert [p.text for p in read_prompts(None, None, io.StringIO("\ufefftext"))] == ["text"]
    assert [p.text for p in read_prompts("", None)] == [""], "asked for in so many words"
    for nothing in ("", "\n"):
        with pytest.raises(UserError, match="standard input is empty"):
            read_prompts(None, None, io.StringIO(nothing))
    for bad, message in (("", "empty"), ("[1]", "line 1"), ('{"text": "x"}', "line 1"), ("{", "not JSON")):
        records.write_text(bad)
        with pytest.raises(UserError, match=message):
            read_prompts(None, str(records))
    records.write_text('{"prompt": "x", "id": 7, "controls": [1, 2]}')
    with pytest.raises(UserError, match="'controls' would be ignored"):
        read_prompts(None, str(records))
    records.write_text('{"prompt": "x", "id": 7}')
    assert [p.text for p in read_prompts(None, str(records))] == ["x"]
    with pytest.raises(UserError, match="no prompt_file"):
        read_prompts(None, str(tmp_path / "none"))
    with pytest.raises(UserError, match="both"):
        read_prompts("a", "b")


def test_a_closed_standard_input_has_no_prompt(monkeypatch):
    """`qkvflow sample --run R <&-`: Python has no `sys.stdin` then."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="there is nothing to continue: give --prompt"):
        read_prompts(None, None)


def test_stop_option():
    assert stop_strings(None) == []
    assert stop_strings("END") == ["END"]
    assert stop_strings(r"\n\n") == ["\n\n"]
    assert stop_strings(r'["\n", "END"]') == ["\n", "END"]
    for one in ("[/INST]", "[END]", "[a", "[1]"):  # not lists
        assert stop_strings(one) == [one]
    for bad in ("", '["a", ""]', '["a", 1]', '["a'):
        with pytest.raises(UserError, match="stop"):
            stop_strings(bad)
