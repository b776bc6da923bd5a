"""What the fork published about its five seeds (WikiText-2, nats per character), and what its own losses give.

The losses are those of `statistical_validation_results/statistics_summary.json` in zaphrode/qkvflow, in the order of
the seeds, which all models share; the claims are those of its RESEARCH_REVIEW_PACKAGE.md, sections 3 and 10.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from scipy import stats

from experiments.statistics import Test, holm, interval, paired_test, welch_test

SEEDS = (42, 123, 456, 789, 1011)
LOSSES = {
    "standard": (2.3389012098312376, 2.352345037460327, 2.3594688892364504, 2.398641896247864, 2.3865777969360353),
    "neural ODE": (2.3205032348632812, 2.3227649211883543, 2.3317282676696776, 2.3360829830169676, 2.3702866077423095),
    "time-indexed MLP": (
        2.2038091659545898,
        2.203382873535156,
        2.232559871673584,
        2.2459284543991087,
        2.2672593116760256,
    ),
    "time-indexed SSM": (
        2.062009024620056,
        2.0257517814636232,
        2.085404562950134,
        2.190477180480957,
        2.3699130535125734,
    ),
}
# The number after ±, called a 95 % confidence interval.
CLAIMED_HALF_WIDTHS = {"standard": 0.022, "neural ODE": 0.018, "time-indexed MLP": 0.025, "time-indexed SSM": 0.124}
# p is claimed to be below this, with Bonferroni's correction.
CLAIMED_P = {
    ("standard", "neural ODE"): 0.05,
    ("standard", "time-indexed MLP"): 0.0001,
    ("standard", "time-indexed SSM"): 0.0001,
}


@dataclass(frozen=True)
class Recomputed:
    """p-values of one pair of models.

    student: of the test that the fork says it made, two independent groups, uncorrected.
    bonferroni: that, corrected for the six pairs, as the fork says it did.
    welch, paired: of tests that do not suppose equal variances, and that use that seeds are shared; `holm`: the paired
    one, corrected for the six pairs.
    """

    student: float
    bonferroni: float
    welch: Test
    paired: Test
    holm: float

    def confirms(self, claimed: float) -> bool:
        """Whether p is below `claimed` in the test that the claim names."""
        return self.bonferroni < claimed


def record() -> dict[str, Any]:
    """What was published, as plain data."""
    claims = [{"pair": list(pair), "below": below} for pair, below in CLAIMED_P.items()]
    return {"seeds": SEEDS, "losses": LOSSES, "half_widths": CLAIMED_HALF_WIDTHS, "p": claims}


def recompute() -> dict[tuple[str, str], Recomputed]:
    """All six pairs."""
    pairs = list(combinations(LOSSES, 2))
    by_seed = {name: dict(zip(SEEDS, values, strict=True)) for name, values in LOSSES.items()}
    paired = [paired_test(by_seed[a], by_seed[b]) for a, b in pairs]
    found = {}
    for (a, b), test, corrected in zip(pairs, paired, holm([t.p for t in paired]), strict=True):
        student = float(stats.ttest_ind(LOSSES[a], LOSSES[b]).pvalue)
        found[a, b] = Recomputed(
            student, min(1.0, len(pairs) * student), welch_test(LOSSES[a], LOSSES[b]), test, corrected
        )
    return found


def table() -> str:
    """Both tables as Markdown."""
    lines = ["| model | published | mean and 95 % interval | sample SD |", "|---|---|---|---|"]
    for name, values in LOSSES.items():
        own = interval(values)
        lines.append(f"| {name} | {own.mean:.3f} ± {CLAIMED_HALF_WIDTHS[name]:.3f} | {own} | {own.sd:.3f} |")
    lines += [
        "",
        f"| pair (n = {len(SEEDS)}) | claimed | Student | x 6 (Bonferroni) | claim holds | Welch | paired |"
        " paired, Holm |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for pair, p in recompute().items():
        claimed = CLAIMED_P.get(pair)
        words = ("", "") if claimed is None else (f"< {claimed:g}", "yes" if p.confirms(claimed) else "no")
        numbers = [f"{x:.2g}" for x in (p.student, p.bonferroni, p.welch.p, p.paired.p, p.holm)]
        cells = [" - ".join(pair), words[0], *numbers[:2], words[1], *numbers[2:]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
