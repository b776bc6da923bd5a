"""Tokenizers: every spec gives a local folder with the right ids, and every mistake a clear message."""

import contextlib
import json
import shutil

import pytest
import tiktoken
from support.tokenizers import with_gaps
from transformers import AutoTokenizer

from qkvflow.data import (
    DataConfig,
    copy_tokenizer,
    load_tokenizer,
    number_of_ids,
    resolve_tokenizer,
    same_tokenizer,
    tokenizer_fingerprint,
)
from qkvflow.data.byte_level import byte_alphabet, byte_tokenizer
from qkvflow.data.special_tokens import end_tokens
from qkvflow.data.statistics import token_byte_lengths
from qkvflow.data.tiktoken_conversion import convert
from qkvflow.errors import Notice, UserError
from qkvflow.generation.vocabulary import Vocabulary

TEXTS = [
    "",
    " ",
    "Hello, world!  It's 12345678 o'clock.\n\n  x\t\r\n",
    "naïve 你好 こんにちは 한국어 עברית 👩‍👩‍👧‍👦 🇫🇷 e\u0301 \ufffd \x00\x7f\x85\u00a0\u3000\u2028",
    "def f(x):\n    return x**2\n\n\nclass A:\n\tpass\n",
    "WE'LL we'll I’m ſ 'S 3.14 x=1_000 ...!!!\n\n",
    "the end<|endoftext|>the start <|fim|> the<|endoftext|>",
]
GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
    r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)


def tiny_encoding(pattern=CL100K, gap=3):
    """All bytes, some merges (and a word that no merge makes), and special tokens around a gap."""
    merges = [
        b"th",
        b"the",
        b" t",
        b" the",
        b"in",
        b"en",
        b"end",
        b"12",
        b"123",
        b"\n\n",
        b"  ",
        b"aa",
        b"aaa",
    ]
    tokens = [bytes([b]) for b in range(255, -1, -1)] + merges + [b"clock"]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    specials = {"<|endoftext|>": len(ranks) + gap, "<|fim|>": len(ranks)}
    return tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)


def test_byte_ids_are_the_bytes(tmp_path):
    tokenizer = load_tokenizer(resolve_tokenizer("byte", tmp_path / "tokenizer"))
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.bos_token_id) == (257, 256, None)
    for text in TEXTS[:-1]:
        ids = tokenizer.encode(text)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<|endoftext|>") == [97, 256]
    assert sorted(byte_alphabet()) == sorted(set(byte_alphabet()))


def test_transformers_reads_the_folder(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(resolve_tokenizer("byte", tmp_path))
    text = "Héllo  , wörld .\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (len(tokenizer), tokenizer.eos_token) == (257, "<|endoftext|>")


@pytest.mark.parametrize("pattern", [GPT2, CL100K])
def test_conversion_gives_tiktokens_ids(pattern):
    encoding = tiny_encoding(pattern)
    tokenizer = convert(encoding)
    words = [
        " the",
        "theend",
        "aaaa a",
        "1234567",
        "\n\n\n",
        "clock",
        "o'clock",
        "   ",
        "é",
        "!\n",
        "'ll",
        "T",
    ]
    texts = [*TEXTS, *(a + b + c for a in words for b in words for c in words)]
    for text in texts:
        assert tokenizer.encode(text).ids == encoding.encode(text, allowed_special="all"), repr(text)


def test_conversion_fills_gaps_in_the_numbers():
    encoding = tiny_encoding(gap=5)
    tokenizer = convert(encoding)
    assert tokenizer.get_vocab_size() == encoding.max_token_value + 1
    assert tokenizer.token_to_id("<|endoftext|>") == encoding.eot_token


def test_one_number_with_two_names_keeps_the_first():
    encoding = tiny_encoding()
    specials = encoding._special_tokens | {"<|reserved|>": encoding._special_tokens["<|fim|>"]}
    ranks = encoding._mergeable_ranks
    twice = tiktoken.Encoding("twice", pat_str=CL100K, mergeable_ranks=ranks, special_tokens=specials)
    tokenizer = convert(twice)
    assert tokenizer.get_vocab_size() == twice.max_token_value + 1
    assert tokenizer.encode("a<|fim|>").ids == twice.encode("a<|fim|>", allowed_special="all")


def test_conversion_refuses_what_it_cannot_say():
    with pytest.raises(UserError, match="cannot be converted exactly"):
        convert(tiny_encoding(r"(?:\p{N}){1,3}+|\p{L}+|\s+|."))


def test_tiktoken_spec(tmp_path, monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: tiny_encoding())
    first = resolve_tokenizer("tiktoken:gpt2", tmp_path / "a")
    second = resolve_tokenizer("tiktoken:gpt2", tmp_path / "b")
    assert load_tokenizer(first).encode(TEXTS[2]) == tiny_encoding().encode(TEXTS[2])
    assert load_tokenizer(first).eos_token_id == tiny_encoding().eot_token
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(second)
    with pytest.raises(UserError, match=r"has no encoding 'gpt7'.*cl100k_base"):
        resolve_tokenizer("tiktoken:gpt7", tmp_path / "c")


def test_tiktoken_file_absent(tmp_path, monkeypatch):
    def no_network(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        resolve_tokenizer("tiktoken:gpt2", tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


def test_local_folder_is_copied_and_kept(tmp_path):
    source = resolve_tokenizer("byte", tmp_path / "source")
    folder = resolve_tokenizer(str(source), tmp_path / "run" / "tokenizer")
    assert tokenizer_fingerprint(folder) == tokenizer_fingerprint(source)
    assert resolve_tokenizer(str(source), folder) == folder
    # The same tokenizer, found in a run that is continued elsewhere.
    assert resolve_tokenizer(str(folder), folder) == folder
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|endoftext|>"}))
    assert tokenizer_fingerprint(folder) != tokenizer_fingerprint(source)
    with pytest.raises(UserError, match="already contains another tokenizer"):
        resolve_tokenizer(str(source), folder)
    with pytest.raises(UserError, match="already contains another tokenizer"):
        resolve_tokenizer("tiktoken:gpt2", folder)


def test_mistakes_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    for spec, message in [
        (str(tmp_path / "empty"), "has no tokenizer.json"),
        (str(tmp_path / "nowhere"), "does not exist"),
        (str(tmp_path / "broken"), "cannot be read"),
        ("no-such-owner/no-such-tokenizer", "could not be fetched from the Hugging Face hub"),
    ]:
        with pytest.raises(UserError, match=message):
            resolve_tokenizer(spec, tmp_path / "out")


def test_a_copy_of_a_folder_of_hugging_face_outlives_it(tmp_path):
    """Which has no record of its origin; older copies have none, either."""
    source = resolve_tokenizer("byte", tmp_path / "source")
    (source / "origin.json").unlink()
    folder = copy_tokenizer(source, tmp_path / "run", str(source))
    older = copy_tokenizer(source, tmp_path / "older", str(source))
    (older / "origin.json").unlink()
    shutil.rmtree(source)
    for made in (folder, older):
        assert resolve_tokenizer(str(source), made) == made
    with pytest.raises(UserError, match="already contains another tokenizer"):
        resolve_tokenizer(str(tmp_path / "elsewhere"), folder)


def test_ids_with_gaps_all_have_a_place(tmp_path):
    """Fewer tokens than the largest id: a vocabulary of as many rows as tokens would have no row for some."""
    tokenizer = with_gaps(tmp_path)
    assert len(tokenizer) == 4
    assert number_of_ids(tokenizer) == len(Vocabulary(tokenizer)) == 8 > max(tokenizer.encode("é bc"))
    assert token_byte_lengths(tokenizer).tolist() == [1, 2, 0, 0, 0, 0, 0, 2]
    assert end_tokens(tmp_path, tokenizer) == (5,)


def test_bytes_of_tokens_that_were_added(tmp_path):
    """As Pythia's runs of spaces, which its vocabulary holds as they are, not in the alphabet of bytes."""
    own = byte_tokenizer()
    own.add_tokens(["  ", "<tool>", "\n\n", "世界"])
    (tmp_path / "a").mkdir()
    own.save(str(tmp_path / "a" / "tokenizer.json"))
    (tmp_path / "a" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = load_tokenizer(tmp_path / "a")
    text = "é  b<tool>\n\nc世界"
    ids = tokenizer.encode(text)
    assert sorted(i for i in ids if i > 256) == [257, 258, 259, 260]
    assert token_byte_lengths(tokenizer)[ids].sum() == len(text.encode())


def test_special_tokens_of_another_file(tmp_path):
    """As transformers reads them; the fingerprint, and so the token caches, depend on what is read."""
    folder, names = resolve_tokenizer("byte", tmp_path / "a"), ("tokenizer_config.json", "special_tokens_map.json")
    prints = {tokenizer_fingerprint(folder)}
    config, special = (folder / name for name in names)
    config.write_text("{}")
    special.write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}, "bos_token": "A"}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.bos_token) == (256, 65, "A")
    prints.add(tokenizer_fingerprint(folder))
    config.write_text(json.dumps({"eos_token": "nothing that it has"}))
    for special_tokens, model, end in [({}, 66, 66), ({}, 67, 67), ({"eos_token": "<|endoftext|>"}, 67, 256)]:
        special.write_text(json.dumps(special_tokens))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": model}))
        assert load_tokenizer(folder).eos_token_id == end
        prints.add(tokenizer_fingerprint(folder))
    assert len(prints) == 5


def test_a_template_in_a_file_comes_first(tmp_path):
    """As in transformers."""
    folder, inline, own = resolve_tokenizer("byte", tmp_path / "tokenizer"), "{{ 'inline' }}", "{{ 'own' }}"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for given in (inline, [{"name": "default", "template": inline}]):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": given}))
        assert load_tokenizer(folder).chat_template == inline
    (folder / "chat_template.jinja").write_text(own)
    assert load_tokenizer(folder).chat_template == own
    assert AutoTokenizer.from_pretrained(str(folder)).chat_template == own


def test_a_folder_that_is_called_byte(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = with_gaps(tmp_path)
    assert other
    shutil.copytree(tmp_path, tmp_path / "byte", ignore=lambda *_: {"byte", "run"})
    made = resolve_tokenizer("byte", tmp_path / "run")
    assert resolve_tokenizer("byte", made) == made


@pytest.mark.parametrize("reaches", [True, False])
def test_a_cache_of_the_hub_with_the_first_file_alone(tmp_path, monkeypatch, reaches):
    whole, part = resolve_tokenizer("byte", tmp_path / "whole"), tmp_path / "part"
    part.mkdir()
    shutil.copyfile(whole / "tokenizer.json", part / "tokenizer.json")

    def snapshot_download(name, local_files_only=False, **options):
        if local_files_only:
            return str(part)
        if not reaches:
            raise OSError("no network")
        return str(whole)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    told = contextlib.nullcontext() if reaches else pytest.warns(Notice, match="may lack files: .*no network")
    with told:
        made = resolve_tokenizer("someone/byte", tmp_path / "made")
    assert (load_tokenizer(made).eos_token_id == 256) is reaches


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ({"truncation": 4}, ["truncation"]),
        ({"padding": 100}, ["padding"]),
        ({"truncation": 4, "padding": 100}, ["truncation", "padding"]),
    ],
)
def test_a_text_is_neither_cut_nor_filled_up(tmp_path, monkeypatch, limits, names):
    """Whatever `tokenizer.json` says for batches of short texts. Tokens that were made with it are not used again."""
    plain, own = resolve_tokenizer("byte", tmp_path / "plain"), byte_tokenizer()
    limited = tmp_path / "limited"
    shutil.copytree(plain, limited)
    if "truncation" in limits:
        own.enable_truncation(limits["truncation"])
    if "padding" in limits:
        own.enable_padding(length=limits["padding"], pad_id=0, pad_token="\x00")
    own.save(str(limited / "tokenizer.json"))
    text = "a longer text"
    for _ in range(2):  # the second one is the first one, remembered
        tokenizer = load_tokenizer(limited)
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.encode_batch([text, "b"]) == [list(text.encode()), [ord("b")]]
    assert same_tokenizer(plain, limited)

    seen = []
    monkeypatch.setattr("qkvflow.data.config.cache_fingerprint", lambda source, settings: seen.append(settings) or "x")
    for source in (plain, limited):
        DataConfig(tokenizer=str(source), cache_dir=str(tmp_path)).resolve(tmp_path / f"{source.name}_run")
    assert sorted(seen[0]) == ["chat_template", "enforce_eos", "format", "tokenizer"]
    assert seen[1].pop("ignored") == names
    assert seen[1].keys() == seen[0].keys()
