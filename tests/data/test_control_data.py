"""The data side of control: from a field of a record to the loss, through cache, packing and batches."""

import dataclasses
import gzip
import itertools
import json
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
import pytest
from levanter.data.loader import DataLoader, stack_tree
from levanter.data.text import (
    ConcatDatasetComponent,
    DatasetComponent,
    SupervisedLmDatasetFormat,
    UrlDatasetSourceConfig,
)
from levanter.models.lm_model import LmExample
from levanter.schedule import BatchSchedule
from support.models import small_config
from support.records import write

from qkvflow.data import BuiltinSource, DataConfig, FilesSource
from qkvflow.data import cache as cache_module
from qkvflow.data.control.sequences import ControlledExample
from qkvflow.depth import DepthConfig
from qkvflow.errors import UserError
from qkvflow.models import ControlConfig

EOS, DIM = 256, 3


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def random_records(count, seed=0, dim=DIM):
    """Documents of 0 to 60 bytes; one in five has no control, one in ten a null."""
    rng = np.random.default_rng(seed)
    records = []
    for _ in range(count):
        record = {"text": "".join(rng.choice(list("abcdefgh "), rng.integers(0, 60)))}
        kind = rng.random()
        if kind > 0.2:
            record["control"] = None if kind < 0.3 else [round(float(x), 3) for x in rng.normal(size=dim)]
        records.append(record)
    return records


def stream(records, end=(EOS,)):
    """By hand: the tokens of all records and the control of each of them."""
    tokens, controls = [], []
    for record in records:
        ids = [*record["text"].encode(), *end]
        tokens += ids
        controls += [record.get("control") or [0.0] * DIM] * len(ids)
    return np.array(tokens), np.array(controls, dtype=np.float32)


def resolve(**settings):
    return DataConfig(**({"control_key": "control"} | settings)).resolve(Path("tokenizer"), DIM)


def only_validation(name):
    return {"c": DatasetComponent(source=FilesSource(validation=[name]))}


def examples(dataset):
    dataset = dataset.as_sync_dataset()
    return [dataset[i] for i in range(len(dataset))]


def joined(dataset):
    found = examples(dataset)
    assert all(isinstance(example, ControlledExample) for example in found)
    tokens = np.concatenate([example.tokens.array for example in found])
    return tokens, np.concatenate([example.control.rearrange(("position", "control")).array for example in found])


# From records to sequences


@pytest.mark.parametrize("kind", ["jsonl", "gz", "json", "parquet", "url"])
def test_each_token_has_the_control_of_its_record(kind):
    """Sequences of 16 tokens: a sequence holds several documents, and a document spans several sequences."""
    records, Pos = random_records(300), hax.Axis("position", 16)
    write("a.jsonl", records)
    end = (EOS,)
    if kind == "url":  # Levanter's own text format, which ends a document by a space too
        source, end = UrlDatasetSourceConfig(validation_urls=["a.jsonl"]), (32, EOS)
    else:
        name = {"gz": "a.jsonl.gz"}.get(kind, f"a.{kind}")
        if kind == "gz":
            Path(name).write_bytes(gzip.compress(Path("a.jsonl").read_bytes()))
        elif kind == "json":
            Path(name).write_text(json.dumps(records))
        elif kind == "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(records), name)
        source = FilesSource(validation=[name])
    data = resolve(components={"c": DatasetComponent(source=source)})
    tokens, controls = joined(data.validation_sets(Pos)["c"])
    expected_tokens, expected = stream(records, end)
    assert len(tokens) == len(expected_tokens) // 16 * 16
    np.testing.assert_array_equal(tokens, expected_tokens[: len(tokens)])
    np.testing.assert_array_equal(controls, expected[: len(tokens)])  # exactly: stored in fp32, nothing rounded twice


def test_documents_without_tokens_shift_nothing():
    records = [{"text": t, "control": [i, 0, 0]} for i, t in enumerate(["", "ab", "", "", "cde", "", "fgh", ""])]
    write("a.jsonl", records)
    data = resolve(components=only_validation("a.jsonl"), enforce_eos=False)
    tokens, controls = joined(data.validation_sets(hax.Axis("position", 4))["c"])
    assert bytes(tokens.tolist()) == b"abcdefgh"
    assert controls[:, 0].tolist() == [1, 1, 4, 4, 4, 6, 6, 6]


def test_controls_keep_to_their_tokens_through_shuffling_mixing_and_concatenation():
    """Each record says its number in its text and in its control; sequences come in any order."""
    Pos = hax.Axis("position", 24)
    for part in "abc":
        offset = 100 * "abc".index(part)
        numbers = range(offset, offset + 90)
        write(f"{part}.jsonl", [{"text": f"{n:03d}" * 5, "control": [n, -n, 1]} for n in numbers])
    source = {part: DatasetComponent(source=FilesSource(train=[f"{part}.jsonl"])) for part in "abc"}
    components = {"one": source["a"], "both": ConcatDatasetComponent(children={"x": source["b"], "y": source["c"]})}
    data = resolve(
        components=components,
        train_weights={"one": 1.0, "both": 2.0},
        num_validation_sequences={"both": 7},
        mixture_block_size=64,
    )
    train_set = data.train_set(Pos, BatchSchedule(4), key=jax.random.PRNGKey(0)).as_sync_dataset()
    found = [train_set[i] for i in range(60)] + examples(data.validation_sets(Pos)["both"])
    seen = set()
    for example in found:
        text, control = bytes(np.minimum(example.tokens.array, 255).astype(np.uint8).tolist()), example.control.array
        ends = [i for i, byte in enumerate(text) if byte == 255]
        for end in ends:
            if end >= 3:  # the last number of a document
                number = int(text[end - 3 : end])
                seen.add(number)
                expected = np.tile([number, -number, 1], (min(end + 1, 16), 1))
                np.testing.assert_array_equal(control[max(end - 15, 0) : end + 1], expected)
    assert {number // 100 for number in seen} == {0, 1, 2}


def test_examples_made_at_once_are_those_made_one_by_one():
    write("a.jsonl", random_records(100))
    sequences = resolve(components=only_validation("a.jsonl")).validation_sets(hax.Axis("position", 16))["c"]
    sequences = sequences.as_sync_dataset()
    for i, found in enumerate(sequences.get_batch(range(9))):
        assert jax.tree.structure(found) == jax.tree.structure(sequences[i])
        jax.tree.map(np.testing.assert_array_equal, found, sequences[i])


def test_batches_stack_and_lie_like_their_tokens():
    Pos, records = hax.Axis("position", 16), random_records(100)
    write("a.jsonl", records)
    sequences = resolve(components=only_validation("a.jsonl")).validation_sets(Pos)["c"]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    with jax.set_mesh(mesh):
        loader = DataLoader(sequences, 4, mesh=mesh, axis_resources={"batch": "data"})
        batches = list(itertools.islice(loader, 3))
    _, expected = stream(records)
    for batch, start in zip(batches, (0, 64, 128), strict=True):
        assert isinstance(batch, ControlledExample)
        assert batch.control.axes == (hax.Axis("batch", 4), Pos, hax.Axis("control", DIM))
        assert batch.control.array.sharding.spec[0] == batch.tokens.array.sharding.spec[0] == "data"
        np.testing.assert_array_equal(batch.control.array.reshape(64, DIM), expected[start : start + 64])


# Caches


def test_the_cache_is_of_this_key_and_size_and_plain_ones_stay():
    record = {"control": [1, 2, 3], "other": [3, 2, 1], "two": [1, 2]}
    write("a.jsonl", [{"text": f"some text {n}", **record} for n in range(20)])
    folder = lambda **settings: resolve(train="a.jsonl", **settings).components["text"].cache_dir  # noqa: E731
    plain = DataConfig(train="a.jsonl").resolve(Path("tokenizer"))
    heard = DataConfig(train="a.jsonl", control_key="two").resolve(Path("tokenizer"), 2)
    seen = {plain.components["text"].cache_dir, heard.components["text"].cache_dir, folder()}
    assert len(seen | {folder(control_key="other")}) == 4
    # A model with control does not change the cache of data without.
    deaf = DataConfig(train="a.jsonl").resolve(Path("tokenizer"), DIM)
    assert deaf.components == plain.components
    train_set = DataConfig(train="a.jsonl", validation_fraction=0.0).resolve(Path("tokenizer"), DIM)
    train_set = train_set.train_set(hax.Axis("position", 8), BatchSchedule(1), key=jax.random.PRNGKey(0))
    assert type(train_set.as_sync_dataset()[0]) is LmExample


def test_a_finished_cache_is_read_without_its_records(monkeypatch):
    records = random_records(50)
    data = resolve(train=write("a.jsonl", records), validation=write("b.jsonl", records))
    Pos = hax.Axis("position", 16)
    first = joined(data.validation_sets(Pos)["text"])
    monkeypatch.setattr(cache_module, "_build", None)
    for one, two in zip(first, joined(data.validation_sets(Pos)["text"]), strict=True):
        np.testing.assert_array_equal(one, two)


# Mistakes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], r"holds a list of 2; a control is a list of 3 finite numbers"),
        ([1, "2", 3], "'2', which is not a number"),
        ([1, True, 3], "True, which is not a number"),
        ([1, None, 3], "None, which is not a number"),
        ([1, [2], 3], "which is not a number"),
        ([1, float("nan"), 3], "nan, which is not finite"),
        ([1, 1e39, 3], "not finite in single precision"),
        ([1, 10**400, 3], "not finite in single precision"),
        (7, "7 of type int"),
        ("1 2 3", "of type str"),
        ({"a": 1}, "of type dict"),
    ],
)
def test_a_bad_control_is_told_with_file_and_record(value, message):
    good = {"text": "fine", "control": [1, 2, 3]}
    write("a.jsonl", [good, good, {"text": "x", "control": value}])
    with pytest.raises(UserError, match=rf"^a\.jsonl:3: the key 'control' .*{message}"):
        resolve(train="a.jsonl", validation_fraction=0.0).build_caches("train")
    Path("b.json").write_text(json.dumps([{"text": "x", "control": value}]))
    with pytest.raises(UserError, match=rf"^b\.json, record 1: the key 'control' .*{message}"):
        resolve(train="b.json")


def test_a_bad_control_of_a_remote_source_is_told_with_its_text():
    write("a.jsonl", [{"text": "fine", "control": [1, 2, 3]}, {"text": "the bad one", "control": [1]}])
    remote = DatasetComponent(source=UrlDatasetSourceConfig(train_urls=["a.jsonl"]))
    with pytest.raises(UserError, match=r"^the record 'the bad one': .*a list of 1;"):
        resolve(components={"c": remote}).build_caches("train")


def test_data_without_records_is_refused():
    Path("a.txt").write_text("plain\n" * 50)
    write("a.jsonl", random_records(5))
    files = FilesSource(train=["a.jsonl"])
    for settings, message in (
        ({"train": "a.txt"}, r"a\.txt: a plain text file has no records"),
        ({"train": "a.jsonl", "validation": "a.txt"}, r"a\.txt: a plain text file has no records"),
        ({}, "built-in text has none"),
        ({"components": {"c": DatasetComponent(source=BuiltinSource())}}, "built-in text has none"),
        ({"components": {"c": DatasetComponent(cache_dir="elsewhere")}}, "made elsewhere"),
        ({"components": {"c": DatasetComponent(source=files, pack=True)}}, "with pack True"),
        (
            {"components": {"c": DatasetComponent(source=files, format=SupervisedLmDatasetFormat())}},
            "SupervisedLmDatasetFormat",
        ),
        ({"train": "a.jsonl", "control_key": "text"}, "given both for the text and for the control"),
    ):
        with pytest.raises(UserError, match=message):
            resolve(**settings)
    with pytest.raises(UserError, match="the model has no control"):
        DataConfig(train="a.jsonl", control_key="control").resolve(Path("tokenizer"))
    assert not Path("cache").exists()


# Learning


def steered_records(count, seed):
    """A letter, and its neighbour: the next one under control +1, the one before under -1. Nothing else tells."""
    rng = np.random.default_rng(seed)
    records = []
    for _ in range(count):
        letter, sign = rng.integers(ord("b"), ord("f")), rng.choice([-1, 1])
        records.append({"text": chr(letter) + chr(letter + sign), "control": [float(sign), 0.0, 0.0]})
    return records


@pytest.mark.slow
def test_a_hybrid_learns_to_hear_its_control():
    """Trained through cache, sequences and loss; evaluated on new documents under the right and the wrong control."""
    Pos = hax.Axis("position", 12)
    data = resolve(train=write("t.jsonl", steered_records(512, 0)), validation=write("v.jsonl", steered_records(64, 1)))
    train_set = data.train_set(Pos, BatchSchedule(64), key=jax.random.PRNGKey(0)).as_sync_dataset()
    batch = stack_tree("batch", train_set.get_batch(range(128)))
    held_out = stack_tree("batch", examples(data.validation_sets(Pos)["text"]))
    config = small_config(
        "constant", depth=DepthConfig(steps=2), control=ControlConfig(dim=DIM), prelude_layers=1, coda_layers=1
    )
    model = config.build(hax.Axis("vocab", 257), key=jax.random.PRNGKey(0))
    weights, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.adam(2e-2)

    def loss(weights, example):
        return eqx.combine(weights, static).compute_next_token_loss(example).scalar()

    @jax.jit
    def train(weights, batch):
        def step(carry, _):
            weights, state = carry
            updates, state = optimizer.update(jax.grad(loss)(weights, batch), state)
            return (optax.apply_updates(weights, updates), state), None

        return jax.lax.scan(step, (weights, optimizer.init(weights)), length=100)[0][0]

    weights, evaluate = train(weights, batch), jax.jit(loss)
    right, wrong, zero = (
        float(evaluate(weights, dataclasses.replace(held_out, control=sign * held_out.control))) for sign in (1, -1, 0)
    )
    # A sequence is four documents of three tokens; its first token is not predicted. Of the other eleven three are
    # letters that nothing tells: 3 log(4) / 11 = 0.38 is the least. Without control four more are coins: 0.63.
    assert right < 0.5
    assert zero > 0.63
    assert wrong > right + 0.5
