"""Recipes: changed as they say, named by what settles a training, and as large as another model."""

import dataclasses
import json

import pytest
from levanter.trainer import TrainerConfig

from experiments.cost import cost_of, width_with
from experiments.recipes import Recipe, merged
from experiments.texts import Builtin
from qkvflow.errors import UserError
from qkvflow.inside.levanter import settle_devices

STANDARD = "configs/wikitext2/standard.yaml"


def test_what_is_of_another_type_keeps_nothing_of_the_old_one():
    base = {"weights": {"type": "generated", "init": "official"}, "depth": {"steps": 6}}
    assert merged(base, {"weights": {"init": "matched"}})["weights"] == {"type": "generated", "init": "matched"}
    assert merged(base, {"weights": {"type": "constant"}}) == {"weights": {"type": "constant"}, "depth": {"steps": 6}}


def test_a_recipe_is_blind_to_what_is_reported_and_named_by_what_settles_it(tmp_path):
    text = Builtin().prepare(tmp_path / "texts")
    recipe = Recipe.of(STANDARD).on(text, tmp_path, 4, 5)
    assert "report.txt" not in json.dumps(recipe.raw)
    assert recipe.raw["trainer"]["steps_per_eval"] == recipe.steps // 5
    elsewhere = Recipe.of(STANDARD).on(Builtin().prepare(tmp_path / "moved"), tmp_path / "other", 4, 5)
    assert recipe.digest() == elsewhere.digest() != recipe.digest(text="another")
    assert recipe.but({"trainer": {"per_device_parallelism": 4}}).digest() == recipe.digest()
    evaluated = {"trainer": {"per_device_eval_parallelism": 4}}  # with `max_eval_batches`, on another part of the text
    for changes in ({"optimizer": {"learning_rate": 0.5}}, {"trainer": {"max_eval_batches": 3}}, evaluated):
        assert recipe.but(changes).digest() != recipe.digest()


def test_the_division_of_a_batch_changes_no_evaluation(tmp_path, monkeypatch):
    """`max_eval_batches` counts batches of training, however these are divided."""
    text = Builtin().prepare(tmp_path / "texts")
    whole, parts = (
        Recipe.of(STANDARD, {"trainer": {"train_batch_size": 8, **own}}).on(text, tmp_path, 4, 5)
        for own in ({}, {"per_device_parallelism": 2})
    )
    read = []
    for recipe in (whole, parts):
        trainer = dataclasses.replace(recipe.config_here.trainer)
        settle_devices(trainer)
        read.append(trainer.eval_batch_size * recipe.raw["trainer"]["max_eval_batches"])
    assert read[0] == read[1] == 32
    assert whole.digest() == parts.digest()
    monkeypatch.setattr(TrainerConfig, "data_axis_size", 2)
    assert parts.config_here.trainer.per_device_eval_parallelism == 4, "on two devices"
    assert whole.config_here.trainer.per_device_eval_parallelism == -1
    monkeypatch.setattr(TrainerConfig, "data_axis_size", 3)
    with pytest.raises(UserError, match=r"reads 8 sequences at a time .* which 3 devices cannot share"):
        assert parts.config_here
    monkeypatch.undo()
    given = {"trainer": {"per_device_parallelism": 2, "per_device_eval_parallelism": 1}}
    assert Recipe.of(STANDARD, given).on(text, tmp_path, 4, 5).config_here.trainer.per_device_eval_parallelism == 1


@pytest.mark.parametrize(("wanted", "width"), [(24_000, 16), (50_000, 24), (35_000, 20)])
def test_the_nearest_width(wanted, width):
    """Odd sizes of heads only where even ones are far away (here 20 = 4 heads of 5)."""
    recipe = Recipe.of(STANDARD, {"model": {"max_seq_len": 16, "depth": {"steps": 6}}})
    assert width_with(recipe, wanted) == width


def test_a_model_of_as_many_parameters_keeps_its_width():
    """260 is no multiple of twice its 4 heads, as are 256 and 264."""
    recipe = Recipe.of(STANDARD, {"model": {"hidden_dim": 260, "max_seq_len": 16, "block": {"num_heads": 4}}})
    own = cost_of(recipe).parameters
    assert [width_with(recipe, round(share * own)) for share in (0.96, 1.0, 1.04)] == [260] * 3
    assert width_with(recipe, round(0.9 * own)) == 248


def test_heads_that_are_not_given_are_those_of_the_block():
    """12, by default."""
    given = Recipe.of(STANDARD, {"model": {"hidden_dim": 24, "max_seq_len": 16, "depth": {"steps": 6}}}).raw
    block = {key: value for key, value in given["model"]["block"].items() if key != "num_heads"}
    recipe = Recipe(given | {"model": given["model"] | {"block": block}})
    assert recipe.config.model.block.num_heads == 12
    assert width_with(recipe, 300_000) == 60
