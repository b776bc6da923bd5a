"""The experiment of adaptive fine-tuning: what it compares is comparable."""

import json
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import pytest

from experiments.adaptive_depth.__main__ import AdaptiveDepthConfig, main
from experiments.adaptive_depth.plan import SMOKE, Scale, planned_jobs, settings
from experiments.adaptive_depth.report import draw, table
from experiments.texts import Text, builtin
from qkvflow.config import decode
from qkvflow.data.sources import BUILTIN_TEXTS
from qkvflow.errors import UserError
from qkvflow.runs.config import FinetuneConfig, TrainConfig


@pytest.fixture
def texts(tmp_path) -> list[Text]:
    return [builtin(name, tmp_path / "texts") for name in BUILTIN_TEXTS]


def test_every_job_is_a_configuration_and_bases_come_first(texts, tmp_path):
    planned = list(planned_jobs(texts, Scale(), tmp_path))
    assert len(planned) == 3 * 2 * (2 + 1 + 2 * (1 + 4))
    assert len({job.name for job in planned}) == len(planned)
    made = set()
    for job in planned:
        if job.is_finetune:
            config = decode(FinetuneConfig, job.config)
            assert config.run in made
            assert job.depth in (None, 8, 6, 4, 3)
        else:
            decode(TrainConfig, job.config)
        made.add(str(tmp_path / job.name))
    assert {job.depth / 6 for job in planned if job.depth} == {4 / 3, 1, 2 / 3, 1 / 2}


def test_flow_and_gpt2_have_the_same_size_once_materialised(texts, tmp_path):
    planned = planned_jobs(texts, Scale(), tmp_path)
    models = {job.system: decode(TrainConfig, job.config).model for job in planned if not job.source}
    vocab = hax.Axis("vocab", 257)

    def size(build):
        shape = eqx.filter_eval_shape(build, jax.random.PRNGKey(0))
        return sum(x.size for x in jax.tree.leaves(shape) if hasattr(x, "size"))

    flow = size(lambda key: models["flow"].build(vocab, key=key).discretise())
    assert flow == size(lambda key: models["gpt2"].build(vocab, key=key))


def test_texts_are_split_without_overlap(texts, tmp_path):
    for text in texts:
        parts = [Path(text.file(part)).read_text() for part in ("select", "report")]
        assert all(len(part) > 20_000 for part in parts)
        assert parts[0][-1] == "\n"
    with pytest.raises(UserError, match="give both texts"):
        main(AdaptiveDepthConfig(run_dir=str(tmp_path)))
    with pytest.raises(UserError, match="cannot be read"):
        main(AdaptiveDepthConfig(wikitext2="nowhere", shakespeare="nowhere", run_dir=str(tmp_path)))


def test_table_and_figure_come_from_the_json_alone(texts, tmp_path):
    results = []
    for index, job in enumerate(planned_jobs(texts, SMOKE, tmp_path)):
        record = {key: getattr(job, key) for key in ("system", "kind", "depth", "source", "target", "seed")}
        before = 3.0 if job.is_finetune else None
        numbers = {"before": before, "curve": [[8, 2.5], [24, 2.0]], "report_loss": 2.0 + index / 100}
        results.append(record | numbers | {"parameters": 10, "trained_parameters": 5})
    record = json.loads(json.dumps({"settings": settings(SMOKE), "results": results}))
    text = table(record)
    assert text.count("| flow | 4 |") == 2
    assert "topics -> library: LoRA and embeddings" in text
    draw(record, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
