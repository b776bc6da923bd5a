"""The fork's published results for five seeds (`published.yaml`), and what its own losses give."""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from scipy import stats

from experiments.statistics import holm, interval, paired
from experiments.tables import Table
from qkvflow.config import decode, read_yaml


@dataclass(frozen=True)
class Claim:
    """The claim that p for a pair of models is below this value."""

    pair: tuple[str, str]
    below: float


@dataclass(frozen=True)
class Published:
    """losses: model -> by seed. half_widths: of its stated confidence intervals. p: claims."""

    seeds: list[int]
    losses: dict[str, list[float]]
    half_widths: dict[str, float]
    p: list[Claim]

    @property
    def claimed(self) -> dict[tuple[str, str], float]:
        return {claim.pair: claim.below for claim in self.p}


@dataclass(frozen=True)
class Recomputed:
    """p-values of one pair of models.

    Attributes:
        student: of the test that the fork reports, for two independent groups; bonferroni: the same, corrected for the
            six pairs, as the fork states.
        welch: without assuming equal variances. paired: by seed; holm: the same, corrected for the six pairs.
    """

    student: float
    bonferroni: float
    welch: float
    paired: float
    holm: float

    def confirms(self, claimed: float) -> bool:
        """Whether p is below `claimed` in the claimed test."""
        return self.bonferroni < claimed


def published() -> Published:
    return decode(Published, read_yaml(Path(__file__).parent / "published.yaml"))


def recompute(given: Published) -> dict[tuple[str, str], Recomputed]:
    """All pairs."""
    pairs = list(combinations(given.losses, 2))
    by_seed = {name: dict(zip(given.seeds, values, strict=True)) for name, values in given.losses.items()}
    tests = [paired(by_seed[a], by_seed[b]).p for a, b in pairs]
    found = {}
    for (a, b), p, corrected in zip(pairs, tests, holm(tests), strict=True):
        first, second = given.losses[a], given.losses[b]
        student, welch = (float(stats.ttest_ind(first, second, equal_var=equal).pvalue) for equal in (True, False))
        found[a, b] = Recomputed(student, min(1.0, len(pairs) * student), welch, p, corrected)
    return found


def loss_table(given: Published) -> Table:
    rows = []
    for name, values in given.losses.items():
        own = interval(values)
        rows.append([name, f"{own.mean:.3f} ± {given.half_widths[name]:.3f}", str(own), f"{own.sd:.3f}"])
    return Table(["model", "published", "mean and 95 % interval", "sample SD"], rows, rule="---")


def claim_table(given: Published) -> Table:
    rows = []
    for pair, p in recompute(given).items():
        claimed = given.claimed.get(pair)
        words = ("", "") if claimed is None else (f"< {claimed:g}", "yes" if p.confirms(claimed) else "no")
        numbers = [f"{x:.2g}" for x in (p.student, p.bonferroni, p.welch, p.paired, p.holm)]
        rows.append([" - ".join(pair), words[0], *numbers[:2], words[1], *numbers[2:]])
    head = [f"pair (n = {len(given.seeds)})", "claimed", "Student", "x 6 (Bonferroni)", "claim holds"]
    return Table([*head, "Welch", "paired", "paired, Holm"], rows, rule="---")
