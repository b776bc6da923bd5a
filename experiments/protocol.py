"""The protocol of a study, as data and in words: the keys of its configuration, with what was found by them."""

from dataclasses import dataclass
from typing import Any, Self

from experiments.config import StudyConfig
from experiments.counts import Counts, about, reached
from experiments.recipes import Recipe
from experiments.texts import Text


@dataclass(kw_only=True)
class Protocol:
    """What a protocol adds to the keys of a configuration: it is mixed into the class of that.

    Attributes:
        parts: what each part of the text is, in words; bytes: of each. counts: `select` or `report` -> what n-grams
            reach there that are counted in the first `counted` tokens of the part `train`, as many as a model is
            trained on.
    """

    text: str
    parts: dict[str, str]
    bytes: dict[str, int]
    tokenizer: str
    tokens_per_step: int
    counted: int
    counts: dict[str, Counts]

    @classmethod
    def of(cls, config: StudyConfig, text: Text, recipe: Recipe, **more: Any) -> Self:
        """
        Args:
            recipe: one of the study's, for tokenizer and tokens; of the most steps if they differ.
            more: other fields of `cls`.
        """
        known = {"text": text.name, "parts": config.text.parts, "bytes": text.sizes(), "tokens_per_step": recipe.tokens}
        known |= {"tokenizer": recipe.config.data.tokenizer, "counted": recipe.steps * recipe.tokens}
        return cls(**config.rules() | known | more, counts=reached(config.batches, recipe, text))

    @property
    def about_text(self) -> str:
        parts = ", ".join(f"{part}: {words} ({self.bytes[part]:,} bytes)" for part, words in self.parts.items())
        return f"Text {self.text}: {parts}."

    @property
    def unit(self) -> str:
        """What a loss is of."""
        return "byte" if self.tokenizer == "byte" else f"{self.tokenizer.rpartition(':')[2]} token"

    def tokens_of(self, batches: int | None) -> str:
        """How much of a text is read, in words."""
        return f"first {batches * self.tokens_per_step:,} tokens, or fewer if it is shorter" if batches else ""

    @property
    def about_report(self) -> str:
        """How much of the part `report` is read."""
        first = self.tokens_of(self.report_batches)
        return f"its {first}" if first else "all of it"

    @property
    def about_seeds(self) -> str:
        return f"{self.n} seeds ({', '.join(map(str, self.seeds))})"

    @property
    def about_counts(self) -> str:
        words = f"counted in the first {self.counted:,} tokens of the training text, as many as a model is trained on"
        return f"n-grams, {words}, reach {about(self.counts['report'])} on the part `report`"

    def about_rates(self, each: str) -> str:
        """How the learning rates were found, for `each` what."""
        rates, seeds = ", ".join(f"{r:g}" for r in self.learning_rates), ", ".join(map(str, self.selection_seeds))
        if len(self.learning_rates) < 2:
            return rates or "that of each configuration, without a search"
        lowest = f"the lowest final loss on `select` with seeds {seeds}"
        return f"the one of {rates} with {lowest}, for {each}"
