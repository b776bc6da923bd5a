"""The family of contrasts: for each a test of difference and one of equivalence, both corrected, and a verdict."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from experiments.compare.plan import CompareConfig
from experiments.compare.record import Comparison, Losses
from experiments.statistics import ALPHA, Difference, Equivalence, equivalence, holm, paired
from experiments.tables import Cell, Table, number


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
    there = {pair: _difference(first, pair) for pair in config.contrasts}
    return [
        pair
        for pair, difference in there.items()
        if difference is not None and equivalence(difference, config.margin).straddles(config.margin)
    ]


def _difference(losses: Losses, pair: tuple[str, str]) -> Difference | None:
    arm, reference = (losses.get(name, {}) for name in pair)
    return paired(arm, reference) if len(arm.keys() & reference.keys()) > 1 else None


def table(record: Comparison) -> Table:
    head = ["contrast", "n", "difference", "p (Holm)", "90 % interval", "p within (Holm)", "verdict"]
    return Table(head, [_row(each) for each in tests(record.protocol, record.losses())])


def _row(each: Tested) -> list[Cell]:
    name = f"{each.arm} - {each.reference}"
    if each.difference is None:
        return [name, "", "", "", "", "", each.verdict]
    interval = f"{each.equivalence.low:.3f} to {each.equivalence.high:.3f}"
    n = f"{each.difference.n}{' *' if each.is_sequential else ''}"
    return [name, n, each.difference, number(each.p_holm), interval, number(each.p_within), each.verdict]


def numbers(record: Comparison) -> Iterator[Mapping[str, Cell]]:
    """The same with all digits, as columns of CSV."""
    for each in tests(record.protocol, record.losses()):
        cells: dict[str, Cell] = {"arm": each.arm, "reference": each.reference, "verdict": each.verdict}
        if each.difference is not None:
            d = each.difference
            cells |= {"n": d.n, "difference": d.mean, "low": d.bounds[0], "high": d.bounds[1], "t": d.t, "df": d.df}
            cells |= {"p": d.p, "p_holm": each.p_holm, "low_90": each.equivalence.low, "high_90": each.equivalence.high}
            cells |= {"p_within": each.equivalence.p, "p_within_holm": each.p_within}
        yield cells


def section(record: Comparison) -> str:
    """The contrasts with what they mean; empty without any."""
    p = record.protocol
    if not p.contrasts:
        return ""
    words = (
        f"One family of {len(p.contrasts)} contrasts, written down before any result: losses at the same number of"
        " steps, paired by seed. Each is tested twice, for a difference (Student's t) and for equivalence within"
        f" ±{p.margin:g} nats (two one-sided tests: p is the larger one, and below {ALPHA:g} exactly if the 90 %"
        " interval is within the margin); both p are corrected by Holm over the family, in which contrasts that are"
        f" missing count too. The verdicts are those of the corrected p at {ALPHA:g}."
    )
    if p.more_seeds:
        words += (
            f" If the interval of a contrast contains an end of the margin after the first {len(p.seeds)} seeds, its"
            f" systems are trained with {len(p.more_seeds)} more ({', '.join(map(str, p.more_seeds))}). For these,"
            " marked *, the number of seeds depends on the first results, so that their p are not exact."
        )
    return f"## Contrasts\n\n{words}\n\n{table(record)}\n\n"
