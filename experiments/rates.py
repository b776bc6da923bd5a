"""Learning rates, chosen by trainings and text that are not reported on; and the trainings that are reported."""

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from experiments import jobs
from experiments.study import StudyConfig
from qkvflow.cli.quiet import Quiet


class Variant(Protocol):
    """What is trained with several seeds.

    label: names it among the runs. size: variants that agree in it share their learning rate.
    flops: of its training. raw: configuration of train_lm without a name, seed and chosen learning rate.
    """

    @property
    def label(self) -> str: ...

    @property
    def size(self) -> Hashable: ...

    @property
    def flops(self) -> float: ...

    @property
    def raw(self) -> dict[str, Any]: ...


V = TypeVar("V", bound=Variant)


@dataclass(frozen=True)
class Job(Generic[V]):
    """One training. `is_reported`: otherwise it only helps to choose a learning rate."""

    variant: V
    seed: int
    rate: float
    is_reported: bool
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return self.config["trainer"]["id"]


def selection_jobs(config: StudyConfig, planned: Iterable[V]) -> list[Job[V]]:
    """Trainings by which learning rates are chosen; none where there is no choice.

    Of variants of the same size, which differ in their number of steps alone, the first one settles the rate.
    """
    rates = config.learning_rates if len(config.learning_rates) > 1 else []
    searched: dict[Hashable, V] = {}
    for variant in planned:
        searched.setdefault(variant.size, variant)
    return [job(v, seed, rate, False) for v in searched.values() for seed in config.selection_seeds for rate in rates]


def choose_rates(searched: Iterable[Job[V]], losses: Iterable[float]) -> dict[Hashable, float]:
    """For each size the learning rate with the lowest mean loss over the seeds; the lower of equals."""
    seen: dict[Hashable, dict[float, list[float]]] = {}
    for one, loss in zip(searched, losses, strict=True):
        seen.setdefault(one.variant.size, {}).setdefault(one.rate, []).append(loss)
    return {
        of: min(sorted(by_rate), key=lambda rate: sum(by_rate[rate]) / len(by_rate[rate]))
        for of, by_rate in seen.items()
    }


def reported_jobs(config: StudyConfig, planned: Iterable[V], chosen: Mapping[Hashable, float]) -> list[Job[V]]:
    """The trainings whose losses are reported, a whole seed before the next."""
    only = config.learning_rates[0] if config.learning_rates else None
    planned = list(planned)
    return [
        job(v, seed, chosen.get(v.size, only or v.raw["optimizer"]["learning_rate"]), True)
        for seed in config.seeds
        for v in planned
    ]


def job(variant: V, seed: int, rate: float, is_reported: bool) -> Job[V]:
    raw = copy.deepcopy(variant.raw)
    raw["trainer"] |= {"id": f"{variant.label}-lr{rate:g}-seed{seed}", "seed": seed}
    raw["optimizer"] |= {"learning_rate": rate}
    return Job(variant, seed, rate, is_reported, raw)


def carry_out(
    config: StudyConfig, planned: list[V], measure: Callable[[Job[V]], dict[str, Any]], quiet: Quiet
) -> dict[str, list[dict[str, Any]]]:
    """All trainings, those that choose learning rates first.

    Args:
        measure: trains what is not trained yet and reads it: `select_loss`, and of reported trainings `report_loss`.

    Returns:
        `results` of the reported trainings, `selection` of the others.
    """

    def all_of(planned: list[Job[V]], loss: str) -> list[dict[str, Any]]:
        return jobs.carry_out(
            planned, measure, weight=lambda job: job.variant.flops, loss=loss, terminal=quiet.terminal
        )

    search = selection_jobs(config, planned)
    if search:
        print(f"{len(search)} trainings to choose learning rates by", file=quiet.terminal)
    searched = all_of(search, "select_loss")
    reported = reported_jobs(config, planned, choose_rates(search, [r["select_loss"] for r in searched]))
    flops = sum(one.variant.flops for one in reported)
    print(f"{len(reported)} trainings to report, {flops:.3g} FLOPs", file=quiet.terminal)
    return {"results": all_of(reported, "report_loss"), "selection": searched}
