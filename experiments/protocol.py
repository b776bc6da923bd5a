"""The protocol of a study, as data and in words: the keys of its configuration, and what they led to."""

from dataclasses import dataclass
from typing import Any, Self

from experiments.config import StudyConfig
from experiments.counts import BEGINNING, Counts, about, reached
from experiments.recipes import Recipe
from experiments.texts import Text

NAMES = {"gpt2": "GPT-2"}  # of tokenizers, as they are written


@dataclass(kw_only=True)
class Protocol:
    """The fields that a protocol adds to a configuration: a mixin for its class.

    Attributes:
        parts: description of each part of the text; bytes: of each. counts: `select`, `report`, or BEGINNING -> losses
            of n-grams counted in the first `counted` tokens of the part `train`, as many as a model trains on.
        known: number of tokens of the part `train`; None in older records, whose tokens are bytes.
    """

    text: str
    parts: dict[str, str]
    bytes: dict[str, int]
    tokenizer: str
    tokens_per_step: int
    counted: int
    counts: dict[str, Counts]
    known: int | None = None

    @classmethod
    def of(cls, config: StudyConfig, text: Text, recipe: Recipe, **more: Any) -> Self:
        """
        Args:
            recipe: one of the study's, for tokenizer and tokens; the one with the most steps if they differ.
            more: other fields of `cls`.
        """
        known = {"text": text.name, "parts": config.text.parts, "bytes": text.sizes(), "tokens_per_step": recipe.tokens}
        known |= {"tokenizer": recipe.config.data.tokenizer, "counted": recipe.steps * recipe.tokens}
        known |= {"known": len(recipe.tokenizer().encode(text.read("train")))}
        return cls(**config.rules() | known | more, counts=reached(config.batches, recipe, text))

    @property
    def about_text(self) -> str:
        parts = ", ".join(f"{part}: {words} ({self.bytes[part]:,} bytes)" for part, words in self.parts.items())
        return f"Text {self.text}: {parts}."

    @property
    def unit(self) -> str:
        """The unit of a loss."""
        name = self.tokenizer.rpartition(":")[2]
        return "byte" if name == "byte" else f"{NAMES.get(name, name)} token"

    def tokens_of(self, batches: int | None) -> str:
        """How much of a text is evaluated, in words."""
        return f"first {batches * self.tokens_per_step:,} tokens, or fewer if it is shorter" if batches else ""

    @property
    def about_report(self) -> str:
        """How much of the part `report` is evaluated."""
        first = self.tokens_of(self.report_batches)
        return f"its {first}" if first else "all of it"

    @property
    def about_seeds(self) -> str:
        return f"{self.n} seeds ({', '.join(map(str, self.seeds))})"

    @property
    def text_tokens(self) -> int:
        """Number of tokens of the training text."""
        return self.bytes["train"] if self.known is None else self.known

    @property
    def about_counts(self) -> str:
        words = f"counted in the first {self.counted:,} tokens of the training text, as many as a model is trained on"
        if self.counted > self.text_tokens:
            words = f"counted in all {self.text_tokens:,} tokens of the training text"
            words += f" (a model is trained on {self.counted:,})"
        whole = self.counts["report"]
        first = self.counts.get(BEGINNING, whole)
        told = f"n-grams, {words}, reach {about(whole)} on the part `report`"
        return told if first == whole else f"{told}, and {about(first)} on the beginning that is read at other depths"

    def about_rates(self, each: str) -> str:
        """How the learning rates were selected, for `each` what."""
        rates, seeds = ", ".join(f"{r:g}" for r in self.learning_rates), ", ".join(map(str, self.selection_seeds))
        if len(self.learning_rates) < 2:
            return rates or "that of each configuration, without a search"
        lowest = f"the lowest final loss on `select` with seeds {seeds}"
        grown = f", and of up to {self.beyond_grid} more while the best is at an edge," if self.beyond_grid else ""
        return f"the one of {rates}{grown} with {lowest}, for {each}"
