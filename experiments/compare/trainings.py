"""The trainings of a comparison, in an order in which those that are done make a page at any time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.compare.contrasts import undecided
from experiments.compare.plan import ROWS, WIDTHS, CompareConfig, arms, narrow
from experiments.compare.record import Trained
from experiments.compare.transfer import checked, checks, corrected, transferred, unsettled
from experiments.jobs import Arm, Job, Rates, reported, selection
from experiments.measure import Measure, Trains
from experiments.records import by_seed
from experiments.texts import Text

SEARCH, CHECK, MORE = "search of rates", "check of the transfer", "more seeds"


@dataclass
class Done:
    """The trainings that have records, and progress: stage -> system -> (done, all). replaced: those of the results
    with transferred rates that were corrected since."""

    selection: list[Trained] = field(default_factory=list)
    results: list[Trained] = field(default_factory=list)
    checks: list[Trained] = field(default_factory=list)
    replaced: list[Trained] = field(default_factory=list)
    progress: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)

    def count(self, stage: str, planned: Sequence[str], found: Sequence[Trained]) -> None:
        """planned: the system of each training."""
        done = [r.system for r in found]
        of = {name: (done.count(name), planned.count(name)) for name in dict.fromkeys(planned)}
        self.progress[stage] = {name: (d, max(d, n)) for name, (d, n) in of.items()}


@dataclass(frozen=True)
class Plan:
    """arms: all variants. search: those that select learning rates."""

    config: CompareConfig
    arms: list[Arm]
    search: list[Arm]

    @staticmethod
    def of(config: CompareConfig, text: Text, run_dir: Path) -> "Plan":
        own = arms(config, text, run_dir)
        return Plan(config, own, own if config.search_width is None else narrow(config, text, run_dir))

    def stages(self) -> dict[str, list[Arm]]:
        """The variants, each in the first stage that needs it: equal steps, other widths, other rows."""
        rows = [row for row in self.config.rows if row in ROWS]
        order = [*sorted(rows, key=lambda row: row != "iso_step")[:1], WIDTHS, *rows]
        found: dict[str, list[Arm]] = {}
        for arm in sorted(self.arms, key=lambda arm: min(order.index(row) for row in arm.what.rows)):
            row = min(arm.what.rows, key=order.index)
            found.setdefault(f"width {arm.what.width}" if row == WIDTHS else ROWS[row], []).append(arm)
        return found

    def estimate(self) -> Iterator[str]:
        """FLOPs of each stage, in words; without rates beyond the grid and more seeds."""
        jobs = selection(self.search, self.config.learning_rates, self.config.selection_seeds)
        work = {SEARCH: [job.arm.flops for job in jobs]}
        work[CHECK] = [arm.flops for arm, _ in checked(self.config, self.arms)]
        work |= {stage: [arm.flops for arm in own for _ in self.config.seeds] for stage, own in self.stages().items()}
        for stage, flops in work.items():
            if flops:
                yield f"{stage}: {len(flops)} trainings, {sum(flops):.3g} FLOPs"
        yield f"all: {sum(map(len, work.values()))} trainings, {sum(map(sum, work.values())):.3g} FLOPs"

    def carry_out(self, measure: Measure[Trained]) -> Done:
        """Makes the trainings that the configuration says, and reads all that are there.

        Raises:
            UserError: a model sees the future, or an existing run has other settings.
        """
        return measure.free_first(self._carried_out)

    def _carried_out(self, measure: Measure[Trained]) -> Done:
        config, done = self.config, Done()

        def trains(job: Job) -> bool:
            return config.trains(job.arm.what.system)

        rates, waiting = self._rates(measure, trains, done)

        def report(stage: str, own: Sequence[Arm], seeds: Sequence[int]) -> None:
            known = [arm for arm in own if arm.group in rates and arm.what.system not in waiting]
            found = [r for _, r in measure.those(reported(known, seeds, rates), trains)]
            done.results += found
            done.count(stage, [arm.what.system for arm in own for _ in seeds], found)

        (first, own), *others = self.stages().items()
        report(first, own, config.seeds)
        losses = {name: by_seed(r for r in done.results if r.system == name) for name in config.names}
        straddling = {name for pair in undecided(config, losses) for name in pair} if config.more_seeds else set()
        if straddling:
            report(MORE, [arm for arm in own if arm.what.system in straddling], config.more_seeds)
        for stage, own in others:
            report(stage, own, config.seeds)
        return done

    def _rates(self, measure: Measure[Trained], trains: Trains, done: Done) -> tuple[Rates, set[str]]:
        """The rates of the variants, as far as they are known: searched, transferred, and corrected by the checks; and
        the systems of which nothing is reported yet, as a check may still correct their rates."""
        config = self.config
        done.selection, chosen = measure.search(self.search, trains)
        grid = selection(self.search, config.learning_rates, config.selection_seeds)
        done.count(SEARCH, [job.arm.what.system for job in grid], done.selection)
        first = transferred(config, self.arms, chosen)
        jobs, most = checks(config, self.arms, first), config.beyond_grid if config.corrects else 0
        done.checks, whole = measure.grown(jobs, trains, "to check rates by", most)
        planned = [arm.what.system for arm, _ in checked(config, self.arms)]
        if planned:
            done.count(CHECK, planned, done.checks)
        rates = corrected(config, self.arms, first, whole)
        before = [arm for arm in self.arms if first.get(arm.group) != rates.get(arm.group)]
        jobs = reported(before, [*config.seeds, *config.more_seeds], first)
        done.replaced = [r for _, r in measure.those(jobs, lambda job: False)]
        return rates, unsettled(config, self.arms, whole)
