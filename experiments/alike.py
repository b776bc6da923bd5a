"""Losses can be compared if they are of the same tokens: a check of trainings, before any of them."""

from collections.abc import Mapping

from experiments.recipes import Recipe
from qkvflow.errors import UserError


def check_alike(given: Mapping[str, Recipe], reference: str, bases: Mapping[str, Recipe] = {}) -> None:
    """
    Args:
        reference: the name of the recipe that the others must agree with.
        bases: name -> the recipe from which a fine-tune has its model and, by default, its tokenizer.

    Raises:
        UserError: a training reads other tokens, or another number of them in a step or an evaluation.
    """
    found = {name: _read(recipe, bases.get(name, recipe)) for name, recipe in given.items()}
    for name, own in found.items():
        for key, value in own.items():
            if value != found[reference][key]:
                raise UserError(
                    f"{name} has {value} for `{key}`, and {reference} has {found[reference][key]}: their losses would"
                    " be of other tokens. Give all the same value, for example in `overrides`"
                )


def _read(recipe: Recipe, base: Recipe) -> dict[str, object]:
    """Key -> its value, for all keys on which the tokens depend."""
    config = recipe.config
    return {
        "data.tokenizer": config.data.tokenizer or base.config.data.tokenizer,
        "train_seq_len, or model.max_seq_len": config.train_seq_len or base.config.model.max_seq_len,
        "trainer.train_batch_size": recipe.batch,
        "trainer.per_device_eval_parallelism": recipe.eval_batch,  # on `select`
    }
