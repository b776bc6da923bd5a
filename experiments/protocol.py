"""The rules that a study followed, as data and in words: its configuration, its text, what counting reaches."""

from dataclasses import dataclass
from typing import Any, Self

from experiments.counts import Counts, about, reached
from experiments.recipes import Recipe
from experiments.study import SeedsConfig
from experiments.texts import Text


@dataclass(kw_only=True)
class Protocol:
    """What a protocol adds to the keys of a configuration: it is mixed into the class of that.

    parts: what each part of the text is, in words; bytes: of each. counts: `select` or `report` -> what n-grams reach
    there that are counted in the first `counted` tokens of the part `train`, as many as a model is trained on.
    """

    text: str
    parts: dict[str, str]
    bytes: dict[str, int]
    tokenizer: str
    tokens_per_step: int
    counted: int
    counts: dict[str, Counts]

    @classmethod
    def of(cls, config: SeedsConfig, text: Text, recipe: Recipe, **more: Any) -> Self:
        """
        Args:
            recipe: one of the study's, for tokenizer and tokens; of the most steps if they differ.
            more: other fields of `cls`.
        """
        given = {"text": text.name, "parts": config.text.parts, "bytes": text.sizes(), "tokens_per_step": recipe.tokens}
        counted, counts = recipe.steps * recipe.tokens, reached(config, recipe, text)
        known = {"tokenizer": recipe.config.data.tokenizer, "counted": counted, "counts": counts}
        return cls(**config.rules() | given | known | more)

    @property
    def about_text(self) -> str:
        parts = ", ".join(f"{part}: {words} ({self.bytes[part]:,} bytes)" for part, words in self.parts.items())
        return f"Text {self.text}: {parts}."

    @property
    def noted(self) -> str:
        """What of the reported losses was known when the study was planned."""
        return f" {self.note}" if self.note else ""

    @property
    def unit(self) -> str:
        """What a loss is of."""
        return "byte" if self.tokenizer == "byte" else f"{self.tokenizer.rpartition(':')[2]} token"

    @property
    def about_report(self) -> str:
        """How much of the part `report` is read."""
        first = (self.report_batches or 0) * self.tokens_per_step
        return f"its first {first:,} tokens, if it has so many" if first else "all of it"

    @property
    def about_seeds(self) -> str:
        return f"{len(self.seeds)} seeds ({', '.join(map(str, self.seeds))})"

    @property
    def about_counts(self) -> str:
        words = (
            f"counted in the first {self.counted:,} tokens of the text to train on, as many as a model is trained on"
        )
        return f"n-grams, {words}, reach {about(self.counts['report'])} on what is reported"

    def about_rates(self, each: str) -> str:
        """How the learning rates were found, for `each` what."""
        rates, seeds = ", ".join(f"{r:g}" for r in self.learning_rates), ", ".join(map(str, self.selection_seeds))
        if len(self.learning_rates) < 2:
            return rates or "that of each configuration, not searched for"
        lowest = f"the lowest loss on `select` at the end of trainings with seeds {seeds}"
        return f"the one of {rates} with {lowest}, for {each}"
