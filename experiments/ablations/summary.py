"""The numbers of the tables, from the JSON of the ablations alone: a line for each arm, and what is read besides."""

from dataclasses import dataclass
from typing import Any

from experiments.statistics import Contrast, Interval, contrasts, interval

Record = dict[str, Any]
Place = tuple[str, int]


@dataclass(frozen=True)
class Line:
    """
    loss: reported, nats per token, and against the reference of the group; p corrected over the arms of the group.
    parameters: what is trained. evaluations: of blocks in a training step. seconds: of a step, over seeds.
    """

    arm: str
    settings: str
    parameters: int
    evaluations: float
    learning_rate: float
    loss: Contrast
    seconds: Interval


def lines(record: Record, group: str) -> list[Line]:
    """All arms of a group, in their order."""
    about = record["protocol"]["groups"][group]
    against = contrasts(losses(record, group), lambda arm: about["reference"])
    found = []
    for arm, what in about["arms"].items():
        model, own = record["models"][what["model"]], _of(record, what["model"])
        seconds = interval([r["seconds_per_step"] for r in own])
        rate = own[0]["learning_rate"]
        found.append(
            Line(arm, what["settings"], model["parameters"], model["evaluations"], rate, against[arm], seconds)
        )
    return found


def losses(record: Record, group: str) -> dict[str, dict[int, float]]:
    """arm -> seed -> reported loss."""
    arms = record["protocol"]["groups"][group]["arms"]
    return {arm: {r["seed"]: r["report_loss"] for r in _of(record, what["model"])} for arm, what in arms.items()}


def read(record: Record, group: str, key: str = "loss") -> dict[tuple[Place, str], Contrast]:
    """(place, arm) -> what is read there, against the reference of the group read there too.

    key: `loss` or `displacement`. All tests of the group are one family.
    """
    about = record["protocol"]["groups"][group]
    values = {
        (place, arm): {r["seed"]: _at(r, place)[key] for r in _of(record, what["model"])}
        for place in places(record, group)
        for arm, what in about["arms"].items()
    }
    return contrasts(values, lambda place_and_arm: (place_and_arm[0], about["reference"]))


def places(record: Record, group: str) -> list[Place]:
    """(solver, steps) where the models of a group are read."""
    return [(solver, steps) for solver, steps in record["protocol"]["groups"][group]["places"]]


def evaluations(record: Record, group: str) -> dict[Place, int]:
    """place -> evaluations of the field that a token takes there."""
    first = next(iter(record["protocol"]["groups"][group]["arms"].values()))["model"]
    return {place: _at(_of(record, first)[0], place)["evaluations"] for place in places(record, group)}


def _of(record: Record, model: str) -> list[Record]:
    return [r for r in record["results"] if r["model"] == model]


def _at(result: Record, place: Place) -> Record:
    return next(r for r in result["readings"] if (r["solver"], r["steps"]) == place)
