"""Examples made many at once are those that Levanter makes one by one."""

import dataclasses
from pathlib import Path

import haliax as hax
import jax
import numpy as np
import pytest
from levanter.data import DataLoader
from levanter.data.text import ConcatDatasetComponent, DatasetComponent, SupervisedLmDatasetFormat
from levanter.eval import DomainTaggedDataset
from levanter.schedule import BatchSchedule
from levanter.trainer import TrainerConfig

from experiments.bench.loading import LevantersData
from qkvflow.data import BuiltinSource, DataConfig, FilesSource
from qkvflow.data import at_once as module

Pos = hax.Axis("position", 64)
PROMPTS = '{"input": "one question ", "target": "two answers"}\n' * 60


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def both(**settings):
    """The data, and the same of Levanter."""
    own = DataConfig(**settings).resolve(Path("tokenizer"))
    return own, LevantersData.like(own)


def text():
    return DatasetComponent(source=BuiltinSource())


def packed():
    return DatasetComponent(source=BuiltinSource(), pack=True)


def prompts():
    Path("a.jsonl").write_text(PROMPTS)
    Path("b.jsonl").write_text(PROMPTS)
    source = FilesSource(train=["a.jsonl"], validation=["b.jsonl"])
    return DatasetComponent(source=source, format=SupervisedLmDatasetFormat())


def joined():
    return ConcatDatasetComponent(children={"x": text(), "y": text()})


def train_sets(data):
    return [one.train_set(Pos, BatchSchedule(4), key=jax.random.PRNGKey(0)) for one in data]


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def _is_padded(example) -> bool:
    return -1 in example.attn_mask.segment_ids[0].array


def _within_documents(example):
    """Levanter's, which counts padding and first tokens too."""
    ids, weights = np.asarray(example.attn_mask.segment_ids[0].array), np.array(example.loss_weight.array)
    for k in range(len(ids) - 1):
        weights[k] *= ids[k] >= 0 and ids[k + 1] == ids[k]
    assert weights[-1] == 0
    return dataclasses.replace(example, loss_weight=hax.named(weights, example.loss_weight.axes))


@pytest.mark.parametrize(
    "parts",
    [(packed,), (text,), (prompts,), (joined,), (text, joined), (text, prompts), (text, packed)],
    ids=lambda parts: "+".join(part.__name__ for part in parts),
)
def test_examples_equal_levanters(parts):
    components = {part.__name__: part() for part in parts}
    data = both(components=components, train_weights=dict.fromkeys(components, 1.0))
    own, levanters = (one.as_sync_dataset() for one in train_sets(data))
    indices = [5, 0, 3, 17, *range(40, 61)]
    for found, expected in zip(own.get_batch(indices), levanters.get_batch(indices), strict=True):
        is_packed = parts == (packed,) or (packed in parts and _is_padded(expected))
        assert_same(found, _within_documents(expected) if is_packed else expected)
    assert_same(own[3], _within_documents(levanters[3]) if parts == (packed,) else levanters[3])
    for name, dataset in data[0].validation_sets(Pos).items():
        expected = data[1].validation_sets(Pos)[name].as_sync_dataset().get_batch(range(7))
        for one, other in zip(dataset.as_sync_dataset().get_batch(range(7)), expected, strict=True):
            assert_same(one, other if name != "packed" else _within_documents(other))


@pytest.mark.parametrize("blocked", [True, False])
def test_documents_are_blocked_as_the_data_says(blocked):
    data = both(components={"c": text()}, block_cross_document_attention=blocked)
    own, levanters = (one.as_sync_dataset().get_batch(range(300)) for one in train_sets(data))
    for found, expected in zip(own, levanters, strict=True):
        assert_same(found, expected)
    assert (own[0].attn_mask.segment_ids is not None) == blocked


def test_batches_of_a_loader_equal_levanters_up_to_the_last():
    """Also with the tags of an evaluation, and where the last batch is filled up."""
    trainer, batches = TrainerConfig(train_batch_size=8), []
    for data in both(components={"c": text()}):
        tagged = DomainTaggedDataset(data.tagged_eval_sets(Pos), 37)
        where = {"mesh": trainer.device_mesh, "axis_resources": trainer.compute_axis_mapping}
        batches.append(list(DataLoader(tagged.as_async_dataset(), batch_size=8, **where)))
    assert len(batches[0]) == 5
    for found, expected in zip(*batches, strict=True):
        assert_same(found, expected)


def test_few_programs_are_compiled_whatever_is_asked_for():
    own, _ = train_sets(both(components={"c": text()}))
    dataset = own.as_sync_dataset()
    for n in [*range(1, 40), module._AT_ONCE + 3]:
        assert len(dataset.get_batch(range(n))) == n
    assert own._mapped._cache_size() <= 1 + module._AT_ONCE.bit_length()
