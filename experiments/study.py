"""What studies over seeds have in common: keys of their YAML, and the rules that they follow, as data and in words."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.counts import ngram_losses
from experiments.results import made_by
from experiments.statistics import LEVEL
from experiments.text_config import Builtin, TextConfig
from experiments.texts import Text
from qkvflow.data.tokenizers import load_tokenizer, resolve_tokenizer
from qkvflow.errors import UserError


@dataclass
class SeedsConfig:
    """
    overrides: merged into the configuration of every model.
    seeds: of the trainings that are reported; a seed settles data order and initial weights.
    evaluations: how often the loss on `select` is read during a training; select_batches: of how many batches.
    report_batches: of how many batches of the part `report` the reported loss is; all if null.
    run_dir: where the runs go. output: folder of the results, by default `<run_dir>/results`.
    config_path: the YAML file that this came from; its name is that of the run directory, `runs/<study>_<name>`.
    redraw: only tables and figures, from `results.json` in `output`.
    """

    overrides: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [42, 123, 456, 789, 1011])
    evaluations: int = 20
    select_batches: int | None = None
    report_batches: int | None = None
    run_dir: str | None = None
    output: str | None = None
    redraw: bool = False
    config_path: str | None = None

    def check(self) -> None:
        """Errors: `UserError` for what cannot be studied, before any work."""
        if len(self.seeds) < 2 or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"`seeds` must be at least two different ones, for intervals and tests; got {self.seeds}")
        if self.evaluations < 1:
            raise UserError(f"`evaluations` must be at least 1, got {self.evaluations}")

    def runs(self, study: str) -> Path:
        """The folder of the runs of `study`."""
        name = "" if self.config_path is None else f"_{Path(self.config_path).stem}"
        return Path(self.run_dir or f"runs/{study}{name}")

    def results(self, runs: Path, name: str = "results") -> Path:
        """The folder of the results: `output`, or `name` in the folder of the runs."""
        return Path(self.output) if self.output else runs / name


@dataclass
class StudyConfig(SeedsConfig):
    """Besides what `SeedsConfig` says:

    text: `{type: wikitext2, folder: DIR}`, `{type: files, name, train, select, report}` or `{type: builtin}`.
    learning_rates: for each model the one with the lowest mean loss on the part `select` at the end of trainings with
        `selection_seeds` is taken; one alone is taken as it is. If empty, that of each configuration.
    selection_seeds: others than `seeds`.
    """

    text: TextConfig = field(default_factory=Builtin)
    learning_rates: list[float] = field(default_factory=list)
    selection_seeds: list[int] = field(default_factory=lambda: [0])

    def check(self) -> None:
        """Errors: `UserError` for what cannot be studied, before any work."""
        super().check()
        both = set(self.seeds) & set(self.selection_seeds)
        if len(self.learning_rates) > 1 and (both or not self.selection_seeds):
            raise UserError(
                f"`selection_seeds` must be others than `seeds`, at least one, but are {self.selection_seeds}: what is"
                " chosen by a training must not be reported of the same one"
            )


def arguments(argv: Sequence[str], smoke: Path, default: Path | None = None) -> list[str]:
    """The command line as it is parsed: `--smoke` stands for `--config` with the file `smoke`; `default` is the file
    where none is named."""
    is_named = any(word.split("=")[0] in ("--config", "--config_path", "--help", "-h") for word in argv)
    file = smoke if "--smoke" in argv else None if is_named else default
    first = [] if file is None else ["--config", str(file)]
    return [*first, *(word for word in argv if word != "--smoke")]


def protocol(config: StudyConfig, text: Text, tokenizer: str, tokens_per_step: int) -> dict[str, Any]:
    """The rules as data, and what counting reaches on what is reported."""
    return {
        "text": text.name,
        "parts": config.text.parts,
        "bytes": text.sizes(),
        "tokenizer": tokenizer,
        "seeds": config.seeds,
        "learning_rates": config.learning_rates,
        "selection_seeds": config.selection_seeds,
        "tokens_per_step": tokens_per_step,
        "select_batches": config.select_batches,
        "report_batches": config.report_batches,
        "counts": _counts(text, tokenizer, (config.report_batches or 0) * tokens_per_step or None),
    }


def _counts(text: Text, tokenizer: str, first: int | None) -> dict[str, float]:
    """What n-grams reach on the `first` tokens of the part `report`; on all if that is None."""
    with tempfile.TemporaryDirectory() as folder:
        words = load_tokenizer(resolve_tokenizer(tokenizer, Path(folder)))
    train, report = (words.encode(Path(text.file(part)).read_text(encoding="utf-8")) for part in ("train", "report"))
    return ngram_losses(train, report[:first], len(words))


def in_words(record: dict[str, Any], *, trainings: str, each: str, paired: str, more: Sequence[str] = ()) -> str:
    """The rules and where the numbers come from, as a Markdown list.

    Args:
        record: `protocol`, and what `jobs.origin` gives.
        trainings: how long they are. each: for what a learning rate is chosen. paired: against what differences are.
        more: what else is to be said.
    """
    p = record["protocol"]
    parts = ", ".join(f"{part}: {p['parts'][part]} ({p['bytes'][part]:,} bytes)" for part in p["parts"])
    rates = ", ".join(f"{r:g}" for r in p["learning_rates"])
    chosen = (
        f"the one of {rates} with the lowest loss on `select` at the end of trainings with seeds"
        f" {', '.join(map(str, p['selection_seeds']))}, for {each}"
        if len(p["learning_rates"]) > 1
        else rates or "that of each configuration, not searched for"
    )
    counts = ", ".join(f"{loss:.3f} (n = {n})" for n, loss in p["counts"].items())
    first = (p["report_batches"] or 0) * p["tokens_per_step"]
    read = f"its first {first:,} tokens, if it has so many" if first else "all of it"
    lines = [
        f"Text {p['text']}: {parts}. Nothing is chosen by the part `report`, which is read once, after the last step"
        f" ({read}).",
        f"Tokenizer {p['tokenizer']}; loss in nats per token. {trainings}",
        f"For comparison: n-grams, counted in the text to train on, reach {counts} on what is reported.",
        f"Learning rate: {chosen}. The model is that after the last step; no step is chosen.",
        f"{len(p['seeds'])} seeds ({', '.join(map(str, p['seeds']))}). A seed settles initial weights and the order of"
        " the text, which is the same for all models.",
        f"Intervals: {LEVEL:.0%}, Student's t; SD of the sample. Differences, tests and d_z are paired by seed,"
        f" {paired}.",
        "Each model passed the test of causality after training: a token is changed, all logits before it stay as they"
        " are, bit for bit.",
        *more,
        made_by(record),
    ]
    return "\n".join(f"- {line}" for line in lines)
