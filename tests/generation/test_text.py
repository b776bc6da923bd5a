"""Text from tokens while they come: no broken characters, nothing behind a stop string, nothing lost."""

import io
import random

import pytest
from levanter.tokenizers import load_tokenizer

from qkvflow.data.tokenizers import resolve_tokenizer
from qkvflow.errors import UserError
from qkvflow.generation.prompts import read_prompts, stop_strings
from qkvflow.generation.text import Continuation, StopStrings, TextStream, encode_prompt


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(resolve_tokenizer("byte", tmp_path_factory.mktemp("tokenizer"))))


def pieces_of(tokenizer, ids, prompt=()):
    stream = TextStream(tokenizer, prompt)
    return [*(stream.push(i) for i in ids), stream.finish()]


TEXT = "Grüße, 世界! 👩‍🚀 naïve — ‰ " * 5


def test_characters_come_whole(tokenizer):
    """One byte per token: no piece may show half a character, and nothing may be missing."""
    pieces = pieces_of(tokenizer, tokenizer.encode(TEXT))
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) == len(TEXT), "each character comes as soon as it is complete"


def test_continuing_a_prompt_gives_the_rest_only(tokenizer):
    ids = tokenizer.encode(TEXT)
    for cut in (1, 7, 60):
        prompt = tokenizer.encode(TEXT[:cut])
        assert "".join(pieces_of(tokenizer, ids[len(prompt) :], prompt)) == TEXT[cut:]


def test_bytes_that_are_no_text(tokenizer):
    """Whatever a model writes, the pieces are the decoding of the whole, and nothing is held back for long."""
    draw = random.Random(0)
    for _ in range(20):
        ids = [draw.randrange(256) for _ in range(100)]
        pieces = pieces_of(tokenizer, ids)
        whole = bytes(ids).decode("utf-8", errors="replace")
        assert "".join(pieces) == whole
        assert all(len(whole) - len("".join(pieces[: n + 1])) <= 100 - n for n in range(100))


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
    for bad, message in (("", "empty"), ("[1]", "line 1"), ('{"text": "x"}', "line 1"), ("{", "not JSON")):
        records.write_text(bad)
        with pytest.raises(UserError, match=message):
            read_prompts(None, str(records))
    with pytest.raises(UserError, match="no prompt_file"):
        read_prompts(None, str(tmp_path / "none"))
    with pytest.raises(UserError, match="both"):
        read_prompts("a", "b")


def test_stop_option():
    assert stop_strings(None) == []
    assert stop_strings("END") == ["END"]
    assert stop_strings(r"\n\n") == ["\n\n"]
    assert stop_strings(r'["\n", "END"]') == ["\n", "END"]
    for bad in ("", '["a", ""]', "[a", "[1]"):
        with pytest.raises(UserError, match="stop"):
            stop_strings(bad)
