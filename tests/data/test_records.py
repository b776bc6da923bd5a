"""Records that do not fit, texts that are cut off, and what a text that is partly evaluated gives for training."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import zstandard
from haliax import Axis
from levanter.data.text import (
    ChatLmDatasetFormat,
    ConcatDatasetComponent,
    DatasetComponent,
    SupervisedLmDatasetFormat,
    UrlDatasetSourceConfig,
)
from levanter.schedule import BatchSchedule
from support.records import write

from qkvflow.data import DataConfig, FilesSource, check_enough_tokens, formats, load_tokenizer
from qkvflow.data.fingerprint import source_identity
from qkvflow.data.formats import DocumentTokenizer
from qkvflow.data.holdout import record_hash, text_boundary
from qkvflow.data.tokenizers import resolve_tokenizer
from qkvflow.errors import UserError

TEMPLATE = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
REFUSING = "{% generation %}{{ raise_exception('No!') }}{% endgeneration %}"
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def chat(question, **more):
    return {"messages": [{"role": "user", "content": question}, CHAT["messages"][1]], **more}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def resolve(**settings):
    return DataConfig(**settings).resolve(Path("tokenizer"))


def build(format, records, **settings):
    source = FilesSource(train=[write("a.jsonl", records)])
    data = resolve(components={"c": DatasetComponent(source=source, format=format)}, **settings)
    return data.build_caches("train")["c"]


CHATS = ChatLmDatasetFormat(chat_template=TEMPLATE)


@pytest.mark.parametrize(
    ("format", "records", "message"),
    [
        (SupervisedLmDatasetFormat(), [{"text": "a"}], r"record 1 of the data \(keys: text\) does not fit .*'input'"),
        (CHATS, [{"text": "a"}], "record 1 of the data has no key 'messages'; keys found: text"),
        (CHATS, [CHAT] * 3 + [{"text": "a"}] + [CHAT], "record 4 of the data has no key 'messages'"),
        (ChatLmDatasetFormat(), [CHAT], "cannot be used: No chat template"),
        (ChatLmDatasetFormat(chat_template=REFUSING), [CHAT], r"record 1 of the data .* does not fit .*No!"),
    ],
)
def test_a_record_that_does_not_fit_is_named(format, records, message):
    with pytest.raises(UserError, match=message):
        build(format, records)
    assert not list(Path().rglob("*.building*"))


def test_the_chat_template_of_the_configuration_is_read():
    given = build(ChatLmDatasetFormat(), [CHAT], chat_template=TEMPLATE, cache_dir="a")
    own = build(CHATS, [CHAT], chat_template="{{ 'unread' }}", cache_dir="b")
    arrays = [cache.jagged_array_tree()["input_ids"].data for cache in (given, own)]
    texts = [bytes(np.asarray(array[: len(b"HiHello")].read().result()).astype(np.uint8)) for array in arrays]
    assert texts == [b"HiHello"] * 2


def test_without_a_mask_any_template_and_any_chat_will_do():
    """The tokens are those of the template alone, white space included."""
    template = "\n  {% for m in messages %}\n  <{{ m['role'] }}> {{ m['content'] }}\n  {% endfor %}\n.\n  "
    chats = [CHAT, {"messages": [{"role": "user", "content": "Hi"}]}]
    with pytest.raises(UserError, match=r"must contain .*generation"):
        build(ChatLmDatasetFormat(chat_template=template), chats)
    cache = build(ChatLmDatasetFormat(chat_template=template, mask_user_turns=False), chats)
    tokens = cache.jagged_array_tree()["input_ids"]
    found = bytes(np.asarray(tokens.data[: int(tokens.offsets[2].read().result())].read().result()).astype(np.uint8))
    alone = dataclasses.replace(load_tokenizer(Path("tokenizer")), _chat_template=template)
    expected = [alone.apply_chat_template(chat["messages"], tokenize=False) for chat in chats]
    assert found.decode() == "".join(expected)


def test_a_changed_template_or_end_token_gives_other_tokens():
    """Also if it stands in a file of its own."""
    folder = resolve_tokenizer("byte", Path("tokenizer"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    (folder / "special_tokens_map.json").write_text("{}")
    source = FilesSource(train=[write("a.jsonl", [CHAT])], text_key=None)

    def places():
        text = DatasetComponent(source=FilesSource(train=["a.txt"]))
        chat = DatasetComponent(source=source, format=ChatLmDatasetFormat())
        found = resolve(components={"text": text, "chat": chat}, tokenizer="tokenizer").components
        return found["text"].cache_dir, found["chat"].cache_dir

    Path("a.txt").write_text("some words")
    first = places()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    second = places()
    assert second[0] == first[0]
    assert second[1] != first[1]
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert places()[0] != first[0]


@pytest.mark.parametrize("frames", [1, 3])
def test_a_compressed_text_that_was_cut_off_is_refused(frames):
    lines = [b"".join(b'{"text": "%d words"}\n' % n for n in range(k, k + 20_000)) for k in range(frames)]
    whole = b"".join(map(zstandard.compress, lines))
    source = FilesSource(train=["a.jsonl.zst"])

    def records():
        shards = source.get_shard_source("train")
        assert shards is not None
        return sum(1 for _ in shards)

    Path("a.jsonl.zst").write_bytes(whole)
    assert records() == 20_000 * frames
    for kept in (len(whole) - 1, len(whole) - len(whole) // frames // 2):
        Path("a.jsonl.zst").write_bytes(whole[:kept])
        with pytest.raises(UserError, match=r"cannot be read: .*cut off|not valid JSON"):
            records()


def test_long_records_are_tokenised_in_groups(monkeypatch):
    monkeypatch.setattr(formats, "_CHARACTERS_AT_ONCE", 100_000)
    tokenizer = load_tokenizer(resolve_tokenizer("byte", Path("tokenizer")))
    groups, encode = [], type(tokenizer).encode_batch

    def counted(self, texts, **options):
        groups.append(sum(map(len, texts)))
        return encode(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "encode_batch", counted)
    texts = ["word and " * 50_000, "", "short", "other " * 30_000]
    made = DocumentTokenizer(tokenizer, "text", enforce_bos=True, enforce_eos=True)([{"text": t} for t in texts])
    assert [row["input_ids"].tolist() for row in made] == [[*text.encode(), 256] for text in texts]
    assert len(groups) > 3
    assert max(groups) < 100_000 + 65_536


def test_a_text_evaluated_on_its_training_sequences_holds_out_nothing_else():
    Path("a.txt").write_text("word\n" * 100)
    Path("b.txt").write_text("other\n" * 100)
    alone = resolve(train="a.txt", num_validation_sequences={"text": 2})
    assert check_enough_tokens(alone, 50).train == {"text": 501}
    both = ConcatDatasetComponent(
        children={
            name: DatasetComponent(source=FilesSource(train=[f"{name}.txt"], validation_fraction=0.5)) for name in "ab"
        }
    )
    joined = resolve(components={"both": both}, num_validation_sequences={"both": 7})
    assert check_enough_tokens(joined, 50).train == {"both/a": 501, "both/b": 601}
    assert len(joined.validation_sets(Axis("position", 50))["both"].as_sync_dataset()) == 7
    with pytest.raises(UserError, match="'text' has validation files, and `num_validation_sequences`"):
        resolve(train="a.txt", validation="b.txt", num_validation_sequences={"text": 2})


LONG_LINES = "".join("word " * n + "\n" for n in (40_000, 30_000, 100_000))


@pytest.mark.parametrize("text", ["A title\n" + "word " * 200_000, LONG_LINES, "x" * 10**6])
def test_a_tenth_is_held_out_whatever_the_lines(text):
    Path("a.txt").write_text(text)
    parts = FilesSource(train=["a.txt"], validation_fraction=0.1)
    shards = parts.get_shard_source("validation")
    assert shards is not None
    held_out = "".join(record["text"] for record in shards)
    assert text.endswith(held_out)
    assert 0.04 < len(held_out) / len(text) < 0.16


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.3])
@pytest.mark.parametrize(
    "text", ["Title 7\n" + "word " * 138 + "\n", "Title 7\n" + "é" * 1000 + "\n", "A B\n" + "x" * 200]
)
def test_of_short_texts_no_more_than_twice_the_fraction_is_held_out(text, fraction):
    Path("a.txt").write_text(text)
    size, boundary = len(text.encode()), text_boundary(Path("a.txt"), fraction)
    assert 0 < size - boundary <= 2 * fraction * size + 4


@pytest.mark.parametrize(
    ("format", "documents"),
    [
        (ChatLmDatasetFormat(chat_template=TEMPLATE), [chat(f"question {n}") for n in range(30)]),
        (
            ChatLmDatasetFormat(chat_template=TEMPLATE, system_prompt="system"),
            [chat("Hi", system=f"{n}") for n in range(30)],
        ),
        (SupervisedLmDatasetFormat(), [{"input": f"{n}", "target": "x"} for n in range(30)]),
    ],
)
def test_documents_that_differ_in_nothing_that_is_read_stay_together(format, documents):
    """Whatever their number and source; a key that is null is as good as none."""
    copies = [{**document, "id": n, "source": None} for n in range(3) for document in documents]
    write("a.jsonl", [*documents, *copies])
    source = FilesSource(train=["a.jsonl"], validation_fraction=0.2)
    made = resolve(components={"c": DatasetComponent(source=source, format=format)}).components["c"]
    assert isinstance(made, DatasetComponent)
    read = made.source
    assert read is not None

    def in_split(split):
        shards = read.get_shard_source(split)
        assert shards is not None
        return [json.dumps({key: record[key] for key in documents[0]}) for record in shards]

    train, held_out = in_split("train"), in_split("validation")
    assert len(train) + len(held_out) == 120
    assert len(set(held_out)) == 6
    assert not set(train) & set(held_out)
    assert source_identity(read)[-1] == "read keys"
    # A format without any of its keys names the first record, not a lack of different documents.
    assert record_hash({"id": 1}, None, ("input",)) != record_hash({"id": 2}, None, ("input",))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": null}', r"record 301 of the data, part '.*', \(keys: text\) does not fit"),
        ('{"other": "x"}', r"record 301 of the data, part '.*', has no key 'text'; keys found: other"),
        ('{"text": "cut o', r"record 301 of the data, part '.*', cannot be read: Invalid control character"),
    ],
)
def test_a_later_record_of_a_url_that_does_not_fit_is_named(monkeypatch, line, message):
    """Workers only say that they failed; shards that are finished are not read again."""
    lines = [json.dumps({"text": f"word {n}"}) for n in range(600)]
    Path("a.jsonl").write_text("\n".join(lines) + "\n")
    lines[300] = line
    Path("b.jsonl").write_text("\n".join(lines) + "\n")

    def fail(building, shards, processor, options, metadata):
        (Path(building) / "00000_a" / "shard_ledger.json").parent.mkdir(parents=True)
        (Path(building) / "00000_a" / "shard_ledger.json").write_text("{}")
        raise RuntimeError("Shard 1 failed 3 times (max 3)")

    monkeypatch.setattr("qkvflow.data.cache.build_cache", fail)
    source = UrlDatasetSourceConfig(train_urls=["a.jsonl", "b.jsonl"])
    data = resolve(components={"c": DatasetComponent(source=source)})
    with pytest.raises(UserError, match=message):
        data.build_caches("train")
    Path("a.jsonl").write_text('{"text": "cut o\n')
    with pytest.raises(UserError, match="record 1 of the data cannot be read"):
        resolve(components={"c": DatasetComponent(source=source)}).build_caches("train")
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_text("\n".join(lines[:300]) + "\n")
    with pytest.raises(RuntimeError, match="Shard 1 failed"):  # for another reason
        resolve(components={"c": DatasetComponent(source=source)}).build_caches("train")


def test_a_text_of_one_character_holds_out_nothing():
    for name, text in [("a.txt", "é"), ("b.txt", "🙂"), ("c.txt", "x")]:
        Path(name).write_text(text)
        source = FilesSource(train=[name], validation_fraction=0.1)
        source.check()
        train, held_out = source.get_shard_source("train"), source.get_shard_source("validation")
        assert train is not None
        assert held_out is not None
        assert [record["text"] for record in train] == [text]
        assert [*held_out] == []


def test_the_split_of_short_texts_has_a_cache_of_its_own():
    """Token caches of an older split of the same files are not used; those whose split is the same are."""
    Path("a.txt").write_text("word " * 2000)
    Path("b.txt").write_text("word " * 4000)
    splits = [("a.txt", 0.1), ("b.txt", 0.1), ("a.txt", 0.0)]
    short, longer, whole = (FilesSource(train=[name], validation_fraction=f) for name, f in splits)
    assert source_identity(short)[3:] == [0.1, "text", "short texts"]
    assert source_identity(longer)[3:] == [0.1, "text"]
    assert source_identity(whole)[3:] == [0.0, "text"]


@pytest.mark.parametrize(
    ("weights", "block", "message"),
    [
        ({"a": 0.9996, "b": 0.0004}, 2048, r"give 'b' the share 0\.0004,.* block of 2048 .* to at least 2500, or"),
        ([(0, {"a": 1.0, "b": 1.0}), (4096, {"a": 4999, "b": 1})], 2048, r"of phase 2 .* at least 5000, or"),
        ({"a": 1.0, "b": 1e-6}, 2048, "No block is large enough .*65535"),
        ({"a": 0.9996, "b": 0.0004}, 2500, None),
        ({"a": 2047, "b": 1}, 2048, None),
        ([(0, {"a": 1.0, "b": 0.0}), (4096, {"a": 0.0, "b": 1.0})], 2048, None),
    ],
)
def test_a_component_of_which_nothing_would_be_read_is_refused(weights, block, message):
    for name in "ab":
        Path(f"{name}.txt").write_text("word\n" * 100)
    parts = {name: DatasetComponent(source=FilesSource(train=[f"{name}.txt"])) for name in "ab"}
    data = resolve(components=parts, train_weights=weights, mixture_block_size=block, cache_dir="cache")
    if message is None:
        check_enough_tokens(data, 50)
        sequences: Any = data.train_set(Axis("position", 50), BatchSchedule(1), key=jax.random.PRNGKey(0))
        mixture = sequences.dataset
        for counts, (_, own) in zip(mixture._counts_per_block_per_stage, mixture.weight_stages, strict=True):
            assert [count > 0 for count in counts] == [name in own for name in "ab"]
        return
    with pytest.raises(UserError, match=message):
        check_enough_tokens(data, 50)
    assert not Path("cache").exists()  # before any work
    check_enough_tokens(data, 50, is_training=False)  # an older run can be evaluated


def test_a_repeated_file_stands_where_it_is_named_first():
    for name in "abc":
        Path(f"{name}.txt").write_text("x")
    files = FilesSource(train=["c.txt", "*.txt", "./c.txt", "a.txt"]).files("train")
    assert [str(path) for path in files] == ["c.txt", "a.txt", "b.txt"]


def test_files_that_are_not_there_are_told_before_a_run_is_made():
    with pytest.raises(UserError, match=r"missing\.txt does not exist"):
        DataConfig(train="missing.txt").check_files()
