"""The family of contrasts: for each a test of difference and one of equivalence, both corrected, and a verdict."""

import math
from dataclasses import dataclass

from experiments.compare.plan import CompareConfig
from experiments.compare.record import Comparison, Losses
from experiments.statistics import ALPHA, Difference, Equivalence, equivalence, holm, paired
from experiments.tables import Cell, Table


@dataclass(frozen=True)
class Tested:
    """One contrast, arm minus reference. p_holm, p_within: of difference and equivalence, each corrected over the
    family. is_sequential: its number of seeds depended on its first results."""

    arm: str
    reference: str
    difference: Difference | None
    equivalence: Equivalence
    p_holm: float
    p_within: float
    is_sequential: bool

    @property
    def verdict(self) -> str:
        if math.isnan(self.p_holm):
            return "not tested: fewer than two common seeds, or no variation"
        is_different, is_within = self.p_holm < ALPHA, self.p_within < ALPHA
        if is_different:
            return "different but within the margin" if is_within else "different"
        return "equivalent" if is_within else "neither"


def tests(config: CompareConfig, losses: Losses) -> list[Tested]:
    """All contrasts, paired by the seeds that both systems have. Those without two count as tests of the family."""
    found = [_difference(losses, pair) for pair in config.contrasts]
    within = [Equivalence() if each is None else equivalence(each, config.margin) for each in found]
    p, q = holm([math.nan if each is None else each.p for each in found]), holm([each.p for each in within])
    more = [each is not None and each.n > len(config.seeds) for each in found]
    columns = zip(config.contrasts, found, within, p, q, more, strict=True)
    return [Tested(*pair, *rest) for pair, *rest in columns]


def undecided(config: CompareConfig, losses: Losses) -> list[tuple[str, str]]:
    """Contrasts whose interval after the first seeds, all of which are there, straddles the margin."""
    first = {
        name: {seed: own[seed] for seed in config.seeds}
        for name, own in losses.items()
        if own.keys() >= set(config.seeds)
    }
    there = [(pair, _difference(first, pair)) for pair in config.contrasts]
    return [pair for pair, own in there if own and equivalence(own, config.margin).straddles(config.margin)]


def _difference(losses: Losses, pair: tuple[str, str]) -> Difference | None:
    arm, reference = (losses.get(name, {}) for name in pair)
    return paired(arm, reference) if len(arm.keys() & reference.keys()) > 1 else None


def table(record: Comparison) -> Table | None:
    """None without contrasts."""
    rows: list[list[Cell]] = []
    for each in tests(record.protocol, record.losses()):
        cells: list[Cell] = [""] * 5
        if each.difference is not None:
            n = f"{each.difference.n}{' *' if each.is_sequential else ''}"
            cells = [n, each.difference, each.p_holm, each.equivalence, each.p_within]
        rows.append([f"{each.arm} - {each.reference}", *cells, each.verdict])
    head = ["contrast", "n", "difference", "p (Holm)", "90 % interval", "p within (Holm)", "verdict"]
    return Table(head, rows, formats={"p (Holm)": ".2g", "p within (Holm)": ".2g"}) if rows else None
