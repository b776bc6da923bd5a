"""The experiment of adaptive fine-tuning: what it compares is comparable."""

import equinox as eqx
import haliax as hax
import jax
import pytest
from support.studies import COUNTS, smoke

from experiments.adaptive_depth.__main__ import STUDY
from experiments.adaptive_depth.plan import AdaptiveDepthConfig, arms
from experiments.adaptive_depth.report import AdaptiveDepth, Settings, Trained
from experiments.jobs import reported
from experiments.recipes import merged
from experiments.study import FOLDER
from experiments.texts import Builtin
from qkvflow.cli import parse
from qkvflow.errors import UserError
from qkvflow.runs.config import FinetuneConfig

FULL = ["--config", str(FOLDER / "adaptive_depth" / "two_texts.yaml")]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """All trainings in their order, on texts that Python carries."""
    folder = tmp_path_factory.mktemp("adaptive_depth")
    config = parse(AdaptiveDepthConfig, FULL)[0]
    texts = [Builtin(name).prepare(folder / "texts") for name in ("topics", "library")]
    return reported(arms(config, texts, folder), config.seeds)


def test_every_job_is_a_configuration_and_bases_come_first(planned):
    assert len(planned) == 3 * 2 * (2 + 1 + 2 * (1 + 4))
    assert len({job.name for job in planned}) == len(planned)
    made = set()
    for job in planned:
        config = job.recipe.config
        if isinstance(config, FinetuneConfig):
            assert config.run in made
            assert config.steps == job.arm.what.depth in (None, 8, 6, 4, 3)
        else:
            assert job.arm.what.kind in ("pretrain", "scratch")
        made.add(str(job.recipe.run.path))
    assert {job.arm.what.depth / 6 for job in planned if job.arm.what.depth} == {4 / 3, 1, 2 / 3, 1 / 2}


def test_flow_and_gpt2_have_the_same_size_once_materialised(planned):
    models = {j.arm.what.system: j.recipe.config.model for j in planned if j.arm.what.kind == "pretrain"}
    vocab = hax.Axis("vocab", 257)

    def size(build):
        shape = eqx.filter_eval_shape(build, jax.random.PRNGKey(0))
        return sum(x.size for x in jax.tree.leaves(shape) if hasattr(x, "size"))

    flow = size(lambda key: models["flow"].build(vocab, key=key).discretise())
    assert flow == size(lambda key: models["gpt2"].build(vocab, key=key))


def test_two_texts_are_needed_and_a_folder_may_be_elsewhere(tmp_path):
    with pytest.raises(UserError, match="nothing to study"):
        STUDY.carry_out(AdaptiveDepthConfig(run_dir=str(tmp_path), seeds=[0, 1]))
    with pytest.raises(UserError, match="both are 'topics'"):
        smoke(STUDY, b={"type": "builtin", "text": "topics"}).check()
    with pytest.raises(UserError, match="both are 'wikitext2'"):  # they would share a folder
        smoke(STUDY, a={"type": "wikitext2", "folder": "one"}, b={"type": "wikitext2", "folder": "two"}).check()
    config = parse(AdaptiveDepthConfig, [*FULL, "--a.folder", "nowhere"])[0]
    config.check()
    with pytest.raises(UserError, match=r"nowhere/valid\.txt cannot be read"):
        config.texts(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpt2": {"num_layers": 5}}, "must be the same number"),
        ({"flow": {"depth": {"steps": {"min": 2, "max": 4}}}}, "must be the same number"),
        ({"depths": []}, "each once, for example"),
        ({"depths": [6, 6]}, "each once, for example"),
        ({"full": {"mode": {"type": "flow"}}}, r"`full\.mode\.type` must be full"),
        ({"lora": {"trainer": {"num_train_steps": 5}}}, "must have as many steps"),
        ({"overrides": {"data": {"tokenizer": "tiktoken:gpt2"}}}, "tokenizer` must be byte"),
    ],
)
def test_what_the_page_could_not_say_is_refused_before_any_training(changes, message):
    config = smoke(STUDY)
    for key, value in changes.items():
        setattr(config, key, merged(getattr(config, key), value) if isinstance(value, dict) else value)
    with pytest.raises(UserError, match=message):
        config.check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flow": {"weights": {"type": "per_layer"}}}, "weights are functions of time"),
        ({"lora": {"mode": {"target_modules": ["nothing"]}}}, "target_modules"),
        (
            {"gpt2": {"max_seq_len": 64}},
            "gpt2-pretrain has 64 for `train_seq_len, or model.max_seq_len`",
        ),
        (
            {"scratch": {"trainer": {"train_batch_size": 4}}},
            "for `trainer.train_batch_size`, and .*scratch has 4",
        ),
        ({"full": {"train_seq_len": 32}}, "full has 32 for `train_seq_len, or model.max_seq_len`, and .* has 128"),
    ],
)
def test_a_base_that_cannot_be_adapted_is_refused_before_its_training(tmp_path, changes, message):
    config = parse(AdaptiveDepthConfig, FULL)[0]
    for key, value in changes.items():
        setattr(config, key, merged(getattr(config, key), value))
    texts = [Builtin(name).prepare(tmp_path / "texts") for name in ("topics", "library")]
    with pytest.raises(UserError, match=message):
        arms(config, texts, tmp_path)


def test_the_page_names_the_modes_as_they_are():
    config = parse(AdaptiveDepthConfig, FULL)[0]
    assert config.kinds == {"full": "all weights", "lora": "LoRA and embeddings"}
    config.lora = merged(config.lora, {"mode": {"train_embeddings": False}})
    assert config.kinds["lora"] == "LoRA"


def test_the_table_comes_from_the_record_alone(tmp_path):
    config = smoke(STUDY)
    results = [
        Trained(
            **vars(job.arm.what),
            seed=job.seed,
            curve=[(8, 2.5), (24, 2.0)],
            report_loss=2.0 + index / 100,
            parameters=10,
            trained_parameters=5,
            before=3.0 if job.arm.base else None,
        )
        for index, job in enumerate(reported(arms(config, config.texts(tmp_path), tmp_path), config.seeds))
    ]
    counts = {name: {"select": COUNTS} for name in ("topics", "library")}
    record = AdaptiveDepth(settings=Settings(3, 40, 24, config.seeds), texts={}, results=results, counts=counts)
    text = STUDY.filled_page(record)
    assert text.count("| flow | 4 | 50.0% | 3.000 ± 0.000 |") == 2
    assert "topics -> library: LoRA and embeddings" in text
    assert [name for name, _ in STUDY.figures(record)] == ["figure"]
