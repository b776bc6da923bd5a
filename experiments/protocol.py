"""The rules that a study followed, as data and in words: its configuration, its text, what counting reaches."""

from dataclasses import dataclass, field
from typing import Any, Self

from experiments.counts import ngram_losses
from experiments.recipes import Recipe
from experiments.study import StudyConfig
from experiments.texts import Text


@dataclass(kw_only=True)
class Protocol:
    """What a protocol adds to the keys of a configuration: it is mixed into the class of that.

    parts: what each part of the text is, in words; bytes: of each. counts: n -> loss of n-grams on the part `report`.
    """

    text: str
    parts: dict[str, str]
    bytes: dict[str, int]
    tokenizer: str
    tokens_per_step: int
    counts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: StudyConfig, text: Text, recipe: Recipe, **more: Any) -> Self:
        """
        Args:
            recipe: one of the study's, for tokenizer and tokens.
            more: other fields of `cls`.
        """
        about = {"text": text.name, "parts": config.text.parts, "bytes": text.sizes(), "tokens_per_step": recipe.tokens}
        words, first = recipe.tokenizer(), (config.report_batches or 0) * recipe.tokens
        train, report = (words.encode(text.read(part)) for part in ("train", "report"))
        counts = ngram_losses(train, report[: first or None], len(words))
        return cls(**config.rules() | about | {"tokenizer": recipe.config.data.tokenizer, "counts": counts} | more)

    @property
    def about_text(self) -> str:
        parts = ", ".join(f"{part}: {words} ({self.bytes[part]:,} bytes)" for part, words in self.parts.items())
        return f"Text {self.text}: {parts}."

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
        return ", ".join(f"{loss:.3f} (n = {n})" for n, loss in self.counts.items())

    def about_rates(self, each: str) -> str:
        """How the learning rates were found, for `each` what."""
        rates, seeds = ", ".join(f"{r:g}" for r in self.learning_rates), ", ".join(map(str, self.selection_seeds))
        if len(self.learning_rates) < 2:
            return rates or "that of each configuration, not searched for"
        lowest = f"the lowest loss on `select` at the end of trainings with seeds {seeds}"
        return f"the one of {rates} with {lowest}, for {each}"
