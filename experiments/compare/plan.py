"""What is trained: systems in the sizes and lengths that the rows ask for, and their trainings, as runs of train_lm."""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.compare.config import CompareConfig
from experiments.compare.cost import Cost, cost_of, width_with
from experiments.systems import merged, system
from experiments.texts import Text


@dataclass(frozen=True)
class Variant:
    """A system in one size, trained for one number of steps.

    rows: those that it stands in. raw: configuration of train_lm without a name, seed and chosen learning rate.
    """

    system: str
    rows: tuple[str, ...]
    width: int
    steps: int
    cost: Cost
    raw: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.system}-d{self.width}-s{self.steps}"


@dataclass(frozen=True)
class Job:
    """One training. `is_reported`: otherwise it only helps to choose a learning rate."""

    variant: Variant
    seed: int
    rate: float
    is_reported: bool
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return self.config["trainer"]["id"]


def variants(config: CompareConfig, text: Text, run_dir: Path) -> list[Variant]:
    """All variants, the reference first; the same model with the same number of steps stands once.

    Errors: `UserError` if a configuration cannot be read, or the costs of a model are not known.
    """
    names = [config.reference, *(name for name in config.systems if name != config.reference)]
    raws = {
        name: system(config.systems[name], config.overrides, text, run_dir, config.select_batches) for name in names
    }
    reference = _variant(config, config.reference, (), raws[config.reference])
    found: dict[str, Variant] = {}

    def add(variant: Variant) -> None:
        known = found.get(variant.label, dataclasses.replace(variant, rows=()))
        found[variant.label] = dataclasses.replace(known, rows=(*known.rows, *variant.rows))

    for row in config.rows:
        for name, raw in raws.items():
            add(_variant(config, name, (row,), _equal(row, raw, reference)))
    return list(found.values())


def selection_jobs(config: CompareConfig, planned: Iterable[Variant]) -> list[Job]:
    """Trainings by which learning rates are chosen; none where there is no choice.

    A variant that differs from another only in its number of steps, as in the row of FLOPs, takes over its rate.
    """
    rates = config.learning_rates if len(config.learning_rates) > 1 else []
    searched: dict[tuple[str, int], Variant] = {}
    for variant in planned:
        searched.setdefault(size(variant), variant)
    return [job(v, seed, rate, False) for v in searched.values() for seed in config.selection_seeds for rate in rates]


def choose_rates(jobs: Iterable[Job], losses: Iterable[float]) -> dict[tuple[str, int], float]:
    """For each size of each system the learning rate with the lowest mean loss over the seeds; the lower of equals."""
    seen: dict[tuple[str, int], dict[float, list[float]]] = {}
    for one, loss in zip(jobs, losses, strict=True):
        seen.setdefault(size(one.variant), {}).setdefault(one.rate, []).append(loss)
    return {
        of: min(sorted(by_rate), key=lambda rate: sum(by_rate[rate]) / len(by_rate[rate]))
        for of, by_rate in seen.items()
    }


def reported_jobs(
    config: CompareConfig, planned: Iterable[Variant], chosen: Mapping[tuple[str, int], float]
) -> list[Job]:
    """The trainings whose losses are reported, a whole seed before the next."""
    only = config.learning_rates[0] if config.learning_rates else None
    planned = list(planned)
    return [
        job(v, seed, chosen.get(size(v), only or v.raw["optimizer"]["learning_rate"]), True)
        for seed in config.seeds
        for v in planned
    ]


def size(variant: Variant) -> tuple[str, int]:
    return variant.system, variant.width


def job(variant: Variant, seed: int, rate: float, is_reported: bool) -> Job:
    raw = copy.deepcopy(variant.raw)
    raw["trainer"] |= {"id": f"{variant.label}-lr{rate:g}-seed{seed}", "seed": seed}
    raw["optimizer"] |= {"learning_rate": rate}
    return Job(variant, seed, rate, is_reported, raw)


def _equal(row: str, raw: dict[str, Any], reference: Variant) -> dict[str, Any]:
    """The configuration that has as many steps, FLOPs or parameters as the reference."""
    steps = reference.steps
    if row == "iso_parameter":
        width = width_with(raw, reference.cost.parameters)
        raw = merged(raw, {"model": {"hidden_dim": width}})
    elif row == "iso_flop":
        steps = max(1, round(steps * reference.cost.flops / cost_of(raw).flops))
    return merged(raw, {"trainer": {"num_train_steps": steps}})


def _variant(config: CompareConfig, name: str, rows: tuple[str, ...], raw: dict[str, Any]) -> Variant:
    width, steps = raw["model"]["hidden_dim"], raw["trainer"]["num_train_steps"]
    raw = merged(raw, {"trainer": {"steps_per_eval": max(1, steps // config.evaluations)}})
    return Variant(name, rows, width, steps, cost_of(raw), raw)
