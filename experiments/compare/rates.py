"""The searched learning rates, and whether those transferred to the width of the comparison are near the best."""

import math
from collections.abc import Mapping

from experiments.compare.record import Comparison
from experiments.search import Tried, at_edge, best, tried
from experiments.tables import Cell, Table


def checked(record: Comparison) -> dict[str, Tried]:
    """system -> the rates around the transferred one."""
    found = {name: tried(r for r in record.checks if r.system == name) for name in record.protocol.names}
    return {name: rates for name, rates in found.items() if rates}


def table(record: Comparison) -> Table | None:
    """The searched rates; None if rates are not transferred, or none is there yet."""
    found = record.tried() if record.protocol.search_width else {}
    return _table(found, {name: _end(record, name, own) for name, own in found.items()}, ["best", "inside"])


def check_table(record: Comparison) -> Table | None:
    """The rates around the transferred ones; None if there is none yet."""
    found = checked(record) if record.protocol.check_rates else {}
    return _table(found, {name: [best(own)] for name, own in found.items()}, ["best"])


def _table(found: Mapping[str, Tried], ends: Mapping[str, list[Cell]], head: list[str]) -> Table | None:
    rates = sorted({rate for own in found.values() for rate in own})
    rows = [[name, *(_cell(own.get(rate)) for rate in rates), *ends[name]] for name, own in found.items()]
    names = [f"{rate:g}" for rate in rates]
    return Table(["model", *names, *head], rows, formats=dict.fromkeys(names, ".3f") | {"best": "g"}) if rows else None


def _cell(loss: float | None) -> Cell:
    return "" if loss is None else loss if math.isfinite(loss) else "diverged"


def _end(record: Comparison, name: str, own: Tried) -> list[Cell]:
    """The best rate, and whether it is inside of the grid."""
    p, done = record.protocol, [r.learning_rate for r in record.selection if r.system == name]
    whole = all(done.count(rate) == len(p.selection_seeds) for rate in {*own, *p.learning_rates})
    grows = at_edge(own) and len(own) < len(p.learning_rates) + p.beyond_grid
    if grows or not whole:
        return ["", "search not finished"]
    return [best(own), "no" if at_edge(own) else "yes"]
