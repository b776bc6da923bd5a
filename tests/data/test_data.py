"""Data: sources, splits, token caches, checks and the unigram baseline."""

import contextlib
import dataclasses
import gzip
import json
import os
import warnings
from itertools import pairwise
from pathlib import Path

import haliax as hax
import jax
import numpy as np
import pytest
from levanter.data.text import (
    ChatLmDatasetFormat,
    ConcatDatasetComponent,
    DatasetComponent,
    HfDatasetSourceConfig,
    LmDataConfig,
    PrebuiltLmDatasetFormat,
    SupervisedLmDatasetFormat,
    TextLmDatasetFormat,
    UrlDatasetSourceConfig,
)
from levanter.schedule import BatchSchedule

from qkvflow.data import BuiltinSource, DataConfig, FilesSource, builtin, check_enough_tokens
from qkvflow.data import cache as cache_module
from qkvflow.data.holdout import text_boundary
from qkvflow.data.pieces import pieces
from qkvflow.data.readers import read_records, read_text
from qkvflow.data.statistics import token_byte_lengths, token_counts, unigram_entropy
from qkvflow.errors import Notice, UserError
from qkvflow.training.corpus import _unigram

EOS = 256


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_jsonl(name, texts, key="text"):
    lines = "".join(json.dumps({key: text, "n": n}) + "\n" for n, text in enumerate(texts))
    path = Path(name)
    path.write_bytes(gzip.compress(lines.encode()) if name.endswith(".gz") else lines.encode())
    return name


def resolve(**settings):
    return DataConfig(**settings).resolve(Path("tokenizer"))


def tokens(data, split, name="text"):
    cache = data.build_caches(split)[name]
    return (
        cache.jagged_array_tree()["input_ids"].data[0 : cache.flat_field_length("input_ids")].read().result().tolist()
    )


def documents(source, split):
    shards = source.get_shard_source(split)
    return [] if shards is None else [record["text"] for record in shards]


# Text in pieces


@pytest.mark.parametrize("limit", [1, 7, 50])
def test_pieces_join_to_the_text(limit):
    text = "one two\n\nthree" * 9 + "x" * 120 + " " * 60 + "é e\u0301 end.\n" * 5
    parts = list(pieces(text, limit))
    assert "".join(parts) == text
    assert all(0 < len(part) <= limit for part in parts)
    # An ordinary cut stands between a letter or digit and white space.
    words = list(pieces("some words. and, more words\n" * 20, 50))
    assert all(left[-1].isalnum() and right[0] in " \n" for left, right in pairwise(words))


def test_pieces_of_a_long_document_give_the_ids_of_the_whole(monkeypatch):
    text = ("Words, and more words.\n\n  Ünïcödé — 你好 123 \r\n" * 9000)[:200_000]
    Path("long.txt").write_text(text, encoding="utf-8", newline="")
    records = list(read_text(Path("long.txt"), "text"))
    assert len(records) > 2
    assert "".join(record["text"] for record in records) == text
    data = resolve(train="long.txt", validation_fraction=0.0)
    assert tokens(data, "train") == [*text.encode(), EOS]
    write_jsonl("long.jsonl", [text])
    assert tokens(resolve(train="long.jsonl", validation_fraction=0.0), "train") == [*text.encode(), EOS]


# Splits


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.001, 0.999])
def test_text_split_covers_everything_and_ends_at_a_line(fraction):
    text = "".join(f"line {n} with some words é\n" for n in range(500))
    Path("a.txt").write_text(text, encoding="utf-8")
    source = FilesSource(train=["a.txt"], validation_fraction=fraction)
    train, validation = documents(source, "train"), documents(source, "validation")
    assert "".join(train) + "".join(validation) == text
    assert train[-1].endswith("\n")
    assert validation
    assert abs(len("".join(validation)) / len(text) - fraction) < 0.005


@pytest.mark.parametrize("text", ["no line ends but spaces in it", "é" * 40, "ab", "a\nb", "one line and an end\n"])
def test_text_boundary_leaves_no_part_empty(text):
    Path("a.txt").write_text(text, encoding="utf-8")
    for fraction in (0.01, 0.3, 0.5, 0.99):
        boundary = text_boundary(Path("a.txt"), fraction)
        raw = text.encode()
        assert 0 < boundary < len(raw)
        assert raw[:boundary].decode() + raw[boundary:].decode() == text


def test_record_split_is_disjoint_complete_and_keeps_copies_together():
    texts = [f"document {n % 80}" for n in range(100)]
    write_jsonl("a.jsonl", texts[:50])
    write_jsonl("b.jsonl.gz", texts[50:])
    source = FilesSource(train=["a.jsonl", "b.jsonl.gz"], validation_fraction=0.1)
    train, validation = documents(source, "train"), documents(source, "validation")
    assert sorted(train + validation) == sorted(texts)
    assert not set(train) & set(validation)
    assert len(set(validation)) == 8
    assert validation == documents(source, "validation")


def test_record_split_of_few_documents():
    write_jsonl("two.jsonl", ["one", "two"])
    source = FilesSource(train=["two.jsonl"], validation_fraction=0.01)
    assert len(documents(source, "train")) == len(documents(source, "validation")) == 1
    write_jsonl("same.jsonl", ["same", "same"])
    with pytest.raises(UserError, match="at least two different documents"):
        documents(FilesSource(train=["same.jsonl"], validation_fraction=0.1), "train")


def test_all_kinds_of_files_give_the_same_documents():
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    texts = ["first é", "second\nline", "third"]
    plain = Path(write_jsonl("a.jsonl", texts)).read_bytes()
    write_jsonl("a.jsonl.gz", texts)
    Path("a.jsonl.zst").write_bytes(zstandard.compress(plain))
    Path("list.json").write_text(json.dumps([{"text": text} for text in texts]))
    Path("lines.json").write_bytes(plain.replace(b"\n", b"\n\n"))
    pq.write_table(pa.table({"text": texts, "n": [1, 2, 3]}), "a.parquet")
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "list.json", "lines.json", "a.parquet"):
        source = FilesSource(train=[name])
        source.check()
        assert documents(source, "train") == texts, name
        assert documents(source, "validation") == []
    assert documents(FilesSource(train=["a.jsonl*"]), "train") == texts * 3
    assert documents(FilesSource(train=["a.jsonl", "./a.jsonl"]), "train") == texts


@pytest.mark.parametrize(("text", "least"), [("topics", 400_000), ("library", 10_000_000)])
def test_builtin_texts_are_split_without_leaks(text, least):
    by_name = builtin.BUILTIN_TEXTS[text]()
    parts = {split: documents(BuiltinSource(text=text), split) for split in ("train", "validation")}
    assert sorted(parts["train"] + parts["validation"]) == sorted(by_name.values())
    sizes = {split: sum(map(len, own)) for split, own in parts.items()}
    assert sum(sizes.values()) > least
    assert 0.08 < sizes["validation"] / sum(sizes.values()) < 0.12
    assert len(parts["validation"]) >= 10

    def sequences(texts):
        words = [text.split() for text in texts]
        return {hash(tuple(w[i : i + 8])) for w in words for i in range(len(w) - 7)}

    seen, held_out = sequences(parts["train"]), sequences(parts["validation"])
    assert len(seen & held_out) < 0.01 * len(held_out)


def test_the_library_is_all_of_it_without_tests():
    names = set(builtin.standard_library())
    assert {"ast", "asyncio/tasks", "json/decoder", "encodings/cp437"} <= names
    assert not any(
        part in name.split("/") for name in names for part in ("test", "tests", "site-packages", "pydoc_data")
    )
    with pytest.raises(UserError, match=r"text: 'novel' is not known\. Choices: topics, library"):
        BuiltinSource(text="novel")


# Configuration


def test_default_is_the_builtin_text_in_bytes():
    data = resolve()
    assert type(data).__mro__[1] is LmDataConfig
    counts = check_enough_tokens(data, 128)
    assert list(counts.train) == list(counts.validation) == ["builtin"]
    text = list(builtin.documents_of("topics", "validation"))
    assert tokens(data, "validation", "builtin") == [i for t in text for i in [*t.encode(), EOS]]


def test_shortcuts_replace_the_components():
    Path("my.txt").write_text("a b\n" * 100)
    other = {"big": DatasetComponent(source=BuiltinSource())}
    data = resolve(components=other, train_weights={"big": 2.0}, num_validation_sequences={"big": 3}, train="my.txt")
    assert list(data.components) == ["text"]
    assert data.train_weights == {"text": 1.0}
    assert data.num_validation_sequences is None
    assert len(tokens(data, "train")) + len(tokens(data, "validation")) == 402
    Path("val.txt").write_text("c d\n" * 5)
    data = resolve(train=["my.txt"], validation="val.txt")
    assert (len(tokens(data, "train")), len(tokens(data, "validation"))) == (401, 21)


def test_the_text_key_may_stand_in_source_or_format():
    write_jsonl("a.jsonl", ["first", "second"], key="body")
    expected = [*b"first", EOS, *b"second", EOS]
    source = FilesSource(train=["a.jsonl"])
    for component in (
        DatasetComponent(source=FilesSource(train=["a.jsonl"], text_key="body")),
        DatasetComponent(source=source, format=TextLmDatasetFormat(text_key="body")),
    ):
        assert tokens(resolve(components={"c": component}), "train", "c") == expected
    assert tokens(resolve(train="a.jsonl", text_key="body", validation_fraction=0), "train") == expected
    both = DatasetComponent(
        source=FilesSource(train=["a.jsonl"], text_key="n"), format=TextLmDatasetFormat(text_key="body")
    )
    with pytest.raises(UserError, match="give it once"):
        resolve(components={"c": both})
    inside = DatasetComponent(source=FilesSource(train=["a.jsonl"], format=TextLmDatasetFormat(text_key="body")))
    with pytest.raises(UserError, match="one level up"):
        resolve(components={"c": inside})


def test_other_formats_get_whole_records():
    Path("a.jsonl").write_text('{"input": "one", "target": "two"}\n' * 3)
    component = DatasetComponent(source=FilesSource(train=["a.jsonl"]), format=SupervisedLmDatasetFormat())
    assert tokens(resolve(components={"c": component}), "train", "c") == [*b"onetwo ", EOS] * 3


def test_components_that_cannot_be_read_are_named():
    write_jsonl("a.jsonl", ["x"])
    chats = DatasetComponent(source=FilesSource(train=["a.jsonl"]), format=ChatLmDatasetFormat())
    with pytest.raises(UserError, match=r"the format of component 'c' cannot be used: .*template"):
        resolve(components={"c": chats}).build_caches("train")
    with pytest.raises(UserError, match="the tokens of component c cannot be read"):
        resolve(components={"c": DatasetComponent()}).build_caches("train")


def test_levanter_trains_and_evaluates_on_it():
    Pos = hax.Axis("position", 64)
    components = {
        "one": DatasetComponent(source=BuiltinSource()),
        "both": ConcatDatasetComponent(children={"x": DatasetComponent(source=BuiltinSource())}),
    }
    data = resolve(components=components, train_weights={"one": 1.0, "both": 1.0})
    assert set(check_enough_tokens(data, 64).train) == {"one", "both/x"}
    train_set = data.train_set(Pos, BatchSchedule(4), key=jax.random.PRNGKey(0)).as_sync_dataset()
    assert train_set[0].tokens.array.shape == (64,)
    assert len(data.tagged_eval_sets(Pos)) == 2


# Caches


def test_cache_folder_changes_with_data_tokenizer_and_settings():
    Path("a.txt").write_text("some text\n" * 50)
    folder = lambda **settings: resolve(**({"train": "a.txt"} | settings)).components["text"].cache_dir  # noqa: E731
    first = folder()
    assert first == folder()
    seen = {first, folder(enforce_eos=False), folder(validation_fraction=0.2)}
    other = {"text": DatasetComponent(source=FilesSource(train=["a.txt"]), format=SupervisedLmDatasetFormat())}
    seen.add(folder(train=None, components=other))
    stamp = os.stat("a.txt")
    Path("a.txt").write_text("same size\n" * 50)
    os.utime("a.txt", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    seen.add(folder())
    config = Path("tokenizer/tokenizer_config.json")
    config.write_text(config.read_text().replace('"eos_token"', '"bos_token": "<|endoftext|>", "eos_token"'))
    seen.add(folder())
    assert len(seen) == 6


def test_finished_cache_is_not_built_again(monkeypatch):
    Path("a.txt").write_text("some text\n" * 50)
    expected = tokens(resolve(train="a.txt"), "train")
    monkeypatch.setattr(cache_module, "_build", None)
    assert tokens(resolve(train="a.txt"), "train") == expected


@pytest.mark.parametrize("kind", ["files", "url"])
def test_what_a_killed_build_left_is_never_read(kind):
    write_jsonl("a.jsonl", ["first", "second"])
    if kind == "files":
        source, end = FilesSource(train=["a.jsonl"]), [EOS]
    else:
        source, end = UrlDatasetSourceConfig(train_urls=["a.jsonl"]), [32, EOS]
    data = resolve(components={"c": DatasetComponent(source=source)})
    folder = Path(data.components["c"].cache_dir)
    for torn in (folder / "train", folder / "train.building", folder / "train.building" / "00000_a_jsonl"):
        (torn / "input_ids" / "data").mkdir(parents=True)
        (torn / "input_ids" / "data" / "zarr.json").write_text("{torn")
        (torn / "shard_ledger.json").write_text('{"is_finished": tr' if torn.name == "train" else '{"is_fin')
    if kind == "url":  # Levanter itself replaces a torn shard only if its ledger is not there
        (folder / "train.building" / "00000_a_jsonl" / "shard_ledger.json").unlink()
    assert tokens(data, "train", "c") == [*b"first", *end, *b"second", *end]
    assert sorted(entry.name for entry in folder.iterdir()) == ["train", "train.lock"]


def test_failed_build_leaves_nothing_and_names_the_line():
    Path("a.jsonl").write_text('{"text": "fine"}\n{"text": "broken\n')
    data = resolve(train="a.jsonl", validation_fraction=0)
    for _ in range(2):
        with pytest.raises(UserError, match=r"a\.jsonl:2: not valid JSON"):
            data.build_caches("train")
    assert [entry.name for entry in Path(data.components["text"].cache_dir).iterdir()] == ["train.lock"]


def test_a_number_that_python_does_not_read_is_told_with_its_line():
    record, long = '{"text": "fine", "n": 1}', '{"text": "broken", "n": ' + "9" * 5000 + "}"
    Path("a.jsonl").write_text(f"{record}\n{long}\n")
    Path("a.json").write_text(f"[{record},\n{record},\n{long}]")
    for path, line in (("a.jsonl", 2), ("a.json", 3)):
        with pytest.raises(UserError, match=rf"{path}:{line}: a whole number has more than 4,300 digits. Shorten it"):
            list(read_records(Path(path), "text"))


@pytest.mark.parametrize("keys", [["rebuild_caches"], ["verify_caches"], ["rebuild_caches", "verify_caches"]])
def test_a_check_that_does_not_reach_a_cache_is_told(keys):
    Path("a.txt").write_text("some text\n" * 50)
    own = resolve(train="a.txt")
    expected, source = tokens(own, "train"), own.components["text"].source
    there = DatasetComponent(source=None, cache_dir=own.components["text"].cache_dir)
    parts = {"there": there, "own": DatasetComponent(source=source)}
    asked = resolve(components=parts, **dict.fromkeys(keys, True))
    with pytest.warns(Notice, match=f"^{', '.join(f'data.{key}' for key in keys)}: no effect for component there[.] "):
        assert tokens(asked, "train", "there") == expected
    with warnings.catch_warnings(action="error", category=Notice):
        resolve(components=parts).build_caches("train")
        resolve(train="a.txt", **dict.fromkeys(keys, True)).build_caches("train")


def test_cache_that_cannot_be_written():
    Path("file").write_text("not a folder")
    with pytest.raises(UserError, match="cannot be written"):
        resolve(cache_dir="file").build_caches("train")


# Mistakes


def bad_files():
    Path("empty.txt").touch()
    Path("folder").mkdir()
    Path("a.doc").write_text("x")
    Path("a.txt").write_text("fine\n")
    Path("latin.txt").write_bytes(b"abc\xe9\n")
    Path("blank.jsonl").write_text("\n\n")
    Path("a.gz").write_text("x")
    Path("broken.jsonl.gz").write_text("not compressed")
    Path("number.jsonl").write_text('{"text": 3}\n')
    Path("array.jsonl").write_text("[1]\n")
    Path("half.jsonl").write_text('{"text": "a\\ud800b"}\n')
    Path("broken.parquet").write_text("not parquet")
    write_jsonl("body.jsonl", ["x"], key="body")


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("missing.txt", r"missing\.txt does not exist \(current folder: "),
        ("*.csv", r"no file matches '\*\.csv'"),
        ("empty.txt", "is empty"),
        ("folder", "is a folder; give its files"),
        ("a.doc", r"'\.doc' is not supported; supported are \.txt"),
        ("a.gz", "is not supported"),
        ("latin.txt", "not UTF-8 text: the byte at offset 3"),
        ("blank.jsonl", "no text and no records"),
        ("broken.jsonl.gz", "cannot be read"),
        ("number.jsonl", r"number\.jsonl:1: the key 'text' must hold text, but holds int"),
        ("array.jsonl", "must be an object"),
        ("half.jsonl", r"half\.jsonl:1: \\ud800 is half of a character"),
        ("x" * 300, "too long for a path"),
        ("~nobodyknows/x", "no home"),
        ("broken.parquet", "not a readable parquet file"),
        ("body.jsonl", r"body\.jsonl:1 has no key 'text'; keys found: body, n"),
        ("https://host/a.txt", "not a local path"),
        ([], "needs files"),
    ],
)
def test_file_mistakes_are_named_before_any_work(train, message):
    bad_files()
    with pytest.raises(UserError, match=message):
        resolve(train=train)
    assert not Path("cache").exists()


def test_halves_of_characters_are_named_wherever_they_stand():
    lines = ['{"text": "fine"}', '{"text": "whole \\ud83d\\ude00"}', '{"text": "half \\ude00"}']
    Path("late.jsonl").write_text("\n".join(lines))
    Path("list.json").write_text(f"[{', '.join(lines)}]")
    for name, where in (("late.jsonl", r"late\.jsonl:3"), ("list.json", r"list\.json, record 3")):
        for fraction in (0.0, 0.5):
            data = resolve(train=name, validation_fraction=fraction)
            with pytest.raises(UserError, match=rf"{where}: \\ude00 is half of a character"):
                data.build_caches("train")
    source = FilesSource(train=["late.jsonl"], text_key=None)  # whole records, for formats other than text
    with pytest.raises(UserError, match="half of a character"):
        [*source.records(Path("late.jsonl"))]


@pytest.mark.parametrize(("folder", "told"), [("~nobodyknows/x", "no home"), ("x" * 300, "too long")])
def test_folders_of_caches_that_cannot_be_are_refused(folder, told):
    Path("a.txt").write_text("fine\n")
    with pytest.raises(UserError, match=told):
        resolve(train="a.txt", cache_dir=folder)


def test_other_mistakes_are_named():
    Path("a.txt").write_text("fine\n")
    with pytest.raises(UserError, match="both for training and for validation"):
        resolve(train="a.txt", validation="./a.txt")
    with pytest.raises(UserError, match="without `train`"):
        DataConfig(validation="a.txt")
    with pytest.raises(UserError, match=r"`data\.tokenizer: passthrough` is not available"):
        resolve(train="a.txt", tokenizer="passthrough")
    with pytest.raises(UserError, match="at least 0 and below 1"):
        DataConfig(validation_fraction=1.5)
    with pytest.raises(UserError, match="both given"):
        FilesSource(train=["a.txt"], validation=["b.txt"], validation_fraction=0.1)
    url = {"c": DatasetComponent(source=UrlDatasetSourceConfig(train_urls=["a.txt"]))}
    with pytest.raises(UserError, match="use `type: files`"):
        resolve(components=url)


def test_too_little_text():
    Path("a.txt").write_text("word\n" * 100)
    data = resolve(train="a.txt")
    counts = check_enough_tokens(data, 51)
    assert (counts.train["text"], counts.validation["text"]) == (451, 51)
    with pytest.raises(UserError, match=r"validation text of component 'text' has 51 tokens.*needs 52"):
        check_enough_tokens(data, 52)
    with pytest.raises(UserError, match=r"training text .* 451 tokens.*needs 452.*at most 451"):
        check_enough_tokens(data, 452)
    only_validation = {"v": DatasetComponent(source=FilesSource(validation=["a.txt"]))}
    with pytest.raises(UserError, match="'v' has no training data"):
        check_enough_tokens(resolve(components=only_validation), 8)
    zero = {"v": 0.0, "b": 1.0}
    mixed = only_validation | {"b": DatasetComponent(source=BuiltinSource())}
    assert set(check_enough_tokens(resolve(components=mixed, train_weights=zero), 8).validation) == {"v", "b"}
    held_out = resolve(train="a.txt", num_validation_sequences={"text": 8})
    check_enough_tokens(held_out, 50)
    assert _unigram(held_out, 257) is None  # of no text of its own: these sequences are training text
    with pytest.raises(UserError, match="8 sequences of component 'text', which has 6"):
        check_enough_tokens(held_out, 81)


# Unigram baseline


def test_unigram_entropy_against_its_definition():
    train, validation = np.array([7, 0, 1, 0]), np.array([2, 1, 1, 0])
    probability = (train + 1) / (8 + 4)
    found = unigram_entropy(train, validation, byte_lengths=np.array([1, 3, 1, 0]))
    nats = -(2 * np.log(probability[0]) + np.log(probability[1]) + np.log(probability[2])) / 4
    assert found.nats_per_token == pytest.approx(nats)
    assert found.entropy_per_token == pytest.approx(1.5 * np.log(2))
    assert found.nats_per_byte == pytest.approx(nats * 4 / 6)
    assert unigram_entropy(train, validation).nats_per_byte is None
    with pytest.raises(UserError):
        unigram_entropy(train, np.zeros(4, dtype=np.int64))


def test_token_counts_and_byte_lengths():
    Path("a.txt").write_text("aab é\n", encoding="utf-8")
    data = resolve(train="a.txt", validation_fraction=0)
    caches = data.build_caches("train").values()
    counts = token_counts(caches, 257)
    assert counts.sum() == 8
    assert (counts[ord("a")], counts[0xC3], counts[EOS]) == (2, 1, 1)
    assert token_counts(caches, 257, max_tokens=2)[ord("a")] == 2
    with pytest.raises(UserError, match=r"a token with the id 256, but the vocabulary has 256: .* another tokenizer"):
        token_counts(caches, 256)
    lengths = token_byte_lengths(data.the_tokenizer)
    assert lengths.tolist() == [1] * 256 + [0]
    assert counts @ lengths == len("aab é\n".encode())


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("Dataset scripts are no longer supported, but found web.py", "revision: refs/convert/parquet"),
        ("no such thing", "Check its name and the network"),
    ],
)
def test_a_data_set_that_is_a_script(monkeypatch, reason, advice):
    def fail(*_):
        raise RuntimeError(reason)

    monkeypatch.setattr(HfDatasetSourceConfig, "get_shard_source", fail)
    with pytest.raises(UserError, match=f"'someone/web' cannot be opened: {reason}.*{advice}"):
        cache_module.open_source(HfDatasetSourceConfig(id="someone/web"), "train")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"text_key": "body", "components": True},
            r"`data\.text_key` belongs to `data\.train`.*components\.NAME\.source\.text_key",
        ),
        ({"validation_fraction": 0.5, "components": True}, r"`data\.validation_fraction` belongs to `data\.train`"),
        ({"validation_fraction": 0.5}, r"belongs to `data\.train`, .* the built-in one is fixed"),
        ({"vocab_size": 512}, r"`data\.vocab_size` has no effect"),
        ({"train": "a.jsonl", "max_train_batches": {"txt": 1}}, r"`data\.max_train_batches` has txt, .* is `text`"),
        ({"train": "a.jsonl", "num_validation_sequences": {"txt": 1}}, r"`data\.num_validation_sequences` has txt"),
    ],
)
def test_keys_that_nothing_would_read_are_refused(settings, message):
    write_jsonl("a.jsonl", ["some text"] * 100)
    if settings.get("components"):
        settings = settings | {"components": {"a": DatasetComponent(source=FilesSource(train=["a.jsonl"]))}}
    with pytest.raises(UserError, match=message):
        resolve(**settings)


@pytest.mark.parametrize(
    ("component", "source", "settings", "message"),
    [
        ({"split": "test"}, {}, {}, r"component 'a': `split: test` is read by nothing"),
        ({}, {"tags": ["code"]}, {}, r"`tags` inside `source` .*`components\.a`"),
        ({}, {}, {"permutation_type": "linear"}, r"`data\.shuffle: true` only"),
        ({"tags": ["code"]}, {}, {"permutation_type": "linear", "shuffle": True}, None),
    ],
)
def test_levanter_keys_that_nothing_would_read_are_refused(component, source, settings, message):
    """For a training: what a run has stored is still evaluated."""
    write_jsonl("a.jsonl", ["some text"] * 100)
    part = DatasetComponent(source=FilesSource(train=["a.jsonl"], **source), **component)
    data = DataConfig(components={"a": part}, **settings)
    data.resolve(Path("tokenizer"), is_training=False)
    with contextlib.nullcontext() if message is None else pytest.raises(UserError, match=message):
        data.resolve(Path("tokenizer"))


def test_a_component_without_a_sequence_left_is_named():
    write_jsonl("a.jsonl", ["x" * 47])
    write_jsonl("b.jsonl", ["y" * 47])
    parts = {
        name: DatasetComponent(source=FilesSource(train=[f"{name}.jsonl"], validation_fraction=0.0)) for name in "ab"
    }
    joined = resolve(components={"j": ConcatDatasetComponent(children=parts)}, num_validation_sequences={"j": 2})
    with pytest.raises(UserError, match=r"takes 2 sequences of component 'j', which has 2 of 32 tokens"):
        check_enough_tokens(joined, 32)  # 96 tokens, but no sequence has those of two files
    write_jsonl("c.jsonl", ["x" * 7, "y" * 7, "z" * 7])  # one sequence
    packed = DatasetComponent(source=FilesSource(train=["c.jsonl"], validation_fraction=0.0), pack=True)
    with pytest.raises(UserError, match=r"takes 3 sequences of component 'p', which has 3 of 32 tokens"):
        check_enough_tokens(resolve(components={"p": packed}, num_validation_sequences={"p": 3}), 32)
    Pos, key = hax.Axis("position", 32), jax.random.PRNGKey(0)
    for data in (
        resolve(components={"p": packed}, num_validation_sequences={"p": 1}),
        resolve(components=parts, max_train_batches={"a": 0}),
    ):
        check_enough_tokens(data, 32)
        with pytest.raises(UserError, match=r"component '[ap]' has no sequence of 32 tokens left for training"):
            data.train_set(Pos, BatchSchedule(2), key=key)


def test_records_of_sequences_are_whole_sequences():
    Path("a.jsonl").write_text("".join(json.dumps({"input_ids": [1] * size}) + "\n" for size in (32, 20)))
    source = FilesSource(train=["a.jsonl"], validation_fraction=0.0, text_key=None)
    part = DatasetComponent(source=source, format=PrebuiltLmDatasetFormat())
    with pytest.raises(UserError, match=r"record 2 of `format: prebuilt` has 20 tokens, but .* 32"):
        check_enough_tokens(resolve(components={"a": part}), 32)
    with pytest.raises(UserError, match=r"whole sequences\. Leave `pack` out"):
        resolve(components={"a": dataclasses.replace(part, pack=True)})


def test_a_ledger_of_another_kind_is_no_finished_cache(tmp_path):
    for content in ("[]", "null", "5", "{"):
        (tmp_path / "shard_ledger.json").write_text(content)
        assert not cache_module._is_finished(tmp_path)


def test_json_in_another_encoding_is_named():
    Path("a.json").write_bytes(json.dumps([{"text": "a"}]).encode("utf-16"))
    with pytest.raises(UserError, match=r"a\.json .*UTF-8"):
        list(read_records(Path("a.json"), "text"))
