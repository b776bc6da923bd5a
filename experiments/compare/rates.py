"""The searched learning rates, and whether those transferred to the width of the comparison are near the best."""

import math
from collections.abc import Mapping

from experiments.compare.record import Comparison
from experiments.compare.transfer import after_check
from experiments.search import Tried, at_edge, best, tried
from experiments.tables import Cell, Table


def table(record: Comparison) -> Table | None:
    """The searched rates; None if rates are not transferred, or none is there yet."""
    found = record.tried() if record.protocol.search_width else {}
    return _table(found, {name: _end(record, name, own) for name, own in found.items()}, ["best", "inside"])


def check_table(record: Comparison) -> Table | None:
    """The rates around the transferred ones, and the best, or the one that is used; None if there is none yet."""
    found = {name: tried(r for r in record.checks if r.system == name) for name in record.protocol.names}
    there = {name: rates for name, rates in found.items() if rates}
    if not record.protocol.corrects:
        return _table(there, {name: [best(own)] for name, own in there.items()}, ["best"])
    return _table(there, {name: _verdict(record, name, own) for name, own in there.items()}, ["transferred", "used"])


def replaced_table(record: Comparison) -> Table | None:
    """The reported losses of transferred rates that were corrected since; None without any."""
    rows = [[r.system, r.width, r.steps, r.learning_rate, r.seed, r.report_loss] for r in record.replaced]
    head = ["model", "width", "steps", "rate", "seed", "loss"]
    return Table(head, rows, formats={"rate": "g", "loss": ".3f"}) if rows else None


def _table(found: Mapping[str, Tried], ends: Mapping[str, list[Cell]], head: list[str]) -> Table | None:
    rates = sorted({rate for own in found.values() for rate in own})
    rows = [[name, *(_cell(own.get(rate)) for rate in rates), *ends[name]] for name, own in found.items()]
    names = [f"{rate:g}" for rate in rates]
    formats = dict.fromkeys(names, ".3f") | dict.fromkeys(head, "g")
    return Table(["model", *names, *head], rows, formats=formats) if rows else None


def _cell(loss: float | None) -> Cell:
    return "" if loss is None else loss if math.isfinite(loss) else "diverged"


def _end(record: Comparison, name: str, own: Tried) -> list[Cell]:
    """The best rate, and whether it is inside of the grid."""
    p, done = record.protocol, [r.learning_rate for r in record.selection if r.system == name]
    whole = all(done.count(rate) == len(p.selection_seeds) for rate in {*own, *p.learning_rates})
    if not whole or _grows(record, own, len(p.learning_rates)):
        return ["", "search not finished"]
    return [best(own), "no" if at_edge(own) else "yes"]


def _verdict(record: Comparison, name: str, own: Tried) -> list[Cell]:
    """The transferred rate, and the one that is used after the check."""
    p, (width, *_) = record.protocol, [r.width for r in record.checks if r.system == name]
    rate, planned = p.transferred(best(record.tried()[name]), width), len(p.check_rates.factors) if p.check_rates else 0
    if rate not in own or len(own) < planned or _grows(record, own, planned):
        return [rate, "check not finished"]
    return [rate, after_check(p, rate, own)]


def _grows(record: Comparison, own: Tried, planned: int) -> bool:
    return at_edge(own) and len(own) < planned + record.protocol.beyond_grid
