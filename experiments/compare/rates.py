"""The searched learning rates, and whether those transferred to the width of the comparison are near the best."""

from collections.abc import Iterator, Mapping

from experiments.compare.record import Comparison
from experiments.search import Tried, at_edge, best, tried
from experiments.tables import Cell, Table


def checked(record: Comparison) -> dict[str, Tried]:
    """system -> the rates around the transferred one."""
    found = {name: tried(r for r in record.checks if r.system == name) for name in record.protocol.names}
    return {name: rates for name, rates in found.items() if rates}


def numbers(record: Comparison) -> Iterator[Mapping[str, Cell]]:
    """CSV with a line for each training."""
    for why, trained in (("search", record.selection), ("check", record.checks)):
        for r in trained:
            cells = {"why": why, "system": r.system, "width": r.width, "steps": r.steps, "seed": r.seed}
            yield cells | {"learning_rate": r.learning_rate, "select_loss": r.select_loss}


def section(record: Comparison) -> str:
    """The searched and the checked rates; empty if rates are not transferred."""
    p, found = record.protocol, record.tried()
    if p.search_width is None or not found:
        return ""
    words = f"Mean final loss on `select` at width {p.search_width}, over the selection seeds."
    blocks = [f"\n\n## Learning rates\n\n{words}"]
    rates = sorted({rate for own in found.values() for rate in own})
    rows = [[name, *_cells(own, rates), *_end(record, name, own)] for name, own in found.items()]
    blocks.append(Table(["model", *(f"{rate:g}" for rate in rates), "best", "inside"], rows))
    checks = checked(record)
    if p.check_rates and checks:
        factors = ", ".join(f"{factor:g}" for factor in p.check_rates.factors)
        blocks.append(
            f"Whether the rule holds: models of their own width with {factors} times the transferred rate and seed"
            f" {p.selection_seeds[0]}, final loss on `select`. Nothing is chosen by this."
        )
        rates = sorted({rate for own in checks.values() for rate in own})
        rows = [[name, *_cells(own, rates), f"{best(own):g}"] for name, own in checks.items()]
        blocks.append(Table(["model", *(f"{rate:g}" for rate in rates), "best"], rows))
    return "\n\n".join(map(str, blocks))


def _cells(own: Tried, rates: list[float]) -> list[Cell]:
    return [f"{own[rate]:.3f}" if rate in own else "" for rate in rates]


def _end(record: Comparison, name: str, own: Tried) -> list[Cell]:
    """The best rate, and whether it is inside of the grid."""
    p, done = record.protocol, [r.learning_rate for r in record.selection if r.system == name]
    whole = all(done.count(rate) == len(p.selection_seeds) for rate in {*own, *p.learning_rates})
    grows = at_edge(own) and len(own) < len(p.learning_rates) + p.beyond_grid
    if grows or not whole:
        return ["", "search not finished"]
    return [f"{best(own):g}", "no" if at_edge(own) else "yes"]
