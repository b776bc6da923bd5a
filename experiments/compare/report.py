"""The page of the comparison and its tables, from the record alone."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

from experiments import tables
from experiments.compare import clock, contrasts, rates, widths
from experiments.compare.plan import ROWS, SAME_FLOPS
from experiments.compare.record import CompareProtocol, Comparison, by_row, each, machines, missing, seeds_of
from experiments.cost import SAME_PARAMETERS
from experiments.lines import Line, against, known, table
from experiments.statistics import ALPHA, interval
from experiments.tables import Cell, Table

_BY_TRAININGS = (
    "Times are the smallest median time of a step among a model's trainings on the machine of the reference, which also"
    " did other work: they are what was measured, not a benchmark."
)
_BY_CLOCK = (
    "Times are the smallest of the rounds; the losses are of all trainings, on whatever machine. ± is over seeds alone;"
    " the last column has the smallest and the largest mean difference with the times of a single round."
)


def reached(record: Comparison, line: Line, target: float) -> dict[str, float]:
    """When the loss on the part `select` first reaches `target`: the number of trainings that reach it, and the mean
    steps, seconds (of those that have times) and FLOPs of these; nan if there are none."""
    there = line.reaches(target)
    timed = [(step, min(own)) for step, r in there if (own := record.seconds([r]))]
    steps = _mean(step for step, _ in there)
    # Where depth grows, no step's time stands for all.
    seconds = _mean(step * own for step, own in timed if not line.cost.grows)
    flops = _mean(line.cost.spent(step, line.steps) for step, _ in there)
    return {"n": len(there), "steps": steps, "seconds": seconds, "flops": flops}


def _mean(values: Iterable[float]) -> float:
    """nan without any."""
    own = list(values)
    return statistics.fmean(own) if own else math.nan


def page(record: Comparison) -> Mapping[str, object]:
    p, rows = record.protocol, by_row(record)

    def way(line: Line, target: float) -> str:
        r, n = reached(record, line, target), line.loss.mean.n
        few = "" if r["n"] == n else f" ({r['n']} of {n} seeds)"
        seconds = "-" if math.isnan(r["seconds"]) else f"{r['seconds']:.0f}"
        return f"{r['steps']:.0f}, {seconds}, {r['flops']:.2g}{few}" if r["n"] else "not reached"

    ways = {f"to {t:g}: steps, s, FLOPs": lambda line, t=t: way(line, t) for t in p.targets}
    times = {"ms per step": lambda line: tables.milliseconds(record.seconds(line.trained))}
    costs = {f"{line.what.system} ({row})": line for row, line in each(rows)}
    titled = [f"## {title} (n = {seeds_of({row: rows[row]})})\n\n{own}" for row, title, own in losses(record)]
    tests = "p is Holm-corrected over the models of a row"
    corrects = ", and corrected where the check below fails" if p.corrects else ""
    distances = " or ".join(map(str, sorted({r.curve[0][0] for r in record.results})))
    repeats = p.tokens_per_step / p.text_tokens if p.ngrams else None
    return {
        "missing": missing(record.progress) or None,
        "tokens": p.steps * p.tokens_per_step,
        "times": repeats and p.steps * repeats,
        "longest": max((r.steps for r in record.results), default=p.steps) * (repeats or 0),
        "rates": p.about_search + corrects if p.search_width else p.about_rates("each model in each size"),
        "tests": "the only tests are those of the contrasts" if p.contrasts else tests,
        "same_flops": SAME_FLOPS,
        "same_parameters": SAME_PARAMETERS,
        "alpha": ALPHA,
        "contrasts": contrasts.table(record),
        "family": len(p.contrasts),
        "more_seeds": ", ".join(map(str, p.more_seeds)) or None,
        "published": _published(record),
        "counted": p.counts["report"].get(str(p.ngrams)),
        "beats": _against_counts(record),
        "losses": "\n\n".join(titled) or "None yet.",
        "about_costs": "Speed, memory, and cost to reach given losses" if p.targets else "Speed and memory",
        "distances": distances if p.targets else None,
        "costs": table("model", costs, known("width", "steps"), times, known("peak MiB"), ways) if costs else None,
        "time": clock.table(record),
        "widths": widths.table(record),
        "n_widths": len(p.widths),
        "transfers": _transfers(p),
        "as_many_as_parameters": len(p.widths) == 3 or None,
        "machines": machines(record) or None,
        "by_trainings": record.clock is None or None,
        "clocked": record.clock and f"In each of {record.clock.rounds} rounds, every model makes {record.clock.steps}",
        "how_timed": _BY_TRAININGS if record.clock is None else _BY_CLOCK,
        "timed_on": record.timed_on,
        "searched": rates.table(record),
        "checked": rates.check_table(record),
        "kept": not p.corrects or None,
        "corrected": p.corrects or None,
        "replaced": rates.replaced_table(record),
        "factors": ", ".join(f"{factor:g}" for factor in p.check_rates.factors) if p.check_rates else None,
    }


def _transfers(p: CompareProtocol) -> str:
    """Where the learning rates of the widths come from, after a sentence."""
    if p.search_width is None:
        return ""
    corrects = ", corrected where its check fails" if p.corrects else ""
    return f" Rates outside the width of the search are those of the rule{corrects}."


def losses(record: Comparison) -> list[tuple[str, str, Table]]:
    """For each row its title and table of losses, which the same command reproduces to the last digit."""
    p, rows, found = record.protocol, by_row(record), []
    loss = against(p.reference)
    if p.contrasts:
        del loss["p (Holm)"]
    # In all rows or in none: in LaTeX they are one table.
    n = {} if seeds_of(rows) == str(p.n) else {"n": lambda line: line.loss.mean.n}
    columns = known("width", "trained", "materialised", "steps", "FLOPs", "rate")
    for row, own in rows.items():
        found.append((row, f"At {ROWS[row]}", table("model", own, columns, n, loss)))
    return found


def _against_counts(record: Comparison) -> Table | None:
    """Each system beside n-grams counted in as much text; None if nothing is asked."""
    p, rows = record.protocol, []
    for name, own in record.losses().items() if p.ngrams else ():
        below = interval([loss - p.counts["report"][str(p.ngrams)] for loss in own.values()])
        low, high = below.bounds
        verdict = "yes" if high < 0 else "no" if low > 0 else "open"
        rows.append([name, below.n, interval(list(own.values())), below, verdict])
    head = ["model", "n", "loss", f"minus {p.ngrams}-grams", f"beats {p.ngrams}-grams"]
    return Table(head, rows) if rows else None


def _published(record: Comparison) -> Table | None:
    """Published numbers beside those found; None without any."""
    p, found = record.protocol, record.losses()
    if p.published is None:
        return None
    here = {name: interval(list(own.values())) for name, own in found.items()}
    rows = [[n, p.published.losses.get(n, ""), here.get(n, ""), len(found.get(n, ()))] for n in p.names]
    return Table(["model", "published", "here", "n"], rows, formats={"published": ".3f"})


def files(record: Comparison) -> dict[str, str | Table]:
    """The tables of losses in LaTeX; CSV with a line for each system in each row, for each training, and for each
    contrast, width, time and rate where the page shows them."""
    p, rows = record.protocol, by_row(record)
    titled = {
        f"{tables.in_latex(title)} ($n$ = {seeds_of({row: rows[row]})})": own for row, title, own in losses(record)
    }
    found: dict[str, str | Table] = {"table.tex": tables.latex(titled)} if titled else {}
    runs = [vars(r) | {"rows": " ".join(r.rows), "machine": r.machine or None} for r in record.results]
    tried = {"search": record.selection, "check": record.checks} if p.search_width else {}
    found["summary.csv"], found["runs.csv"] = Table.of(_summary(record)), Table.of(runs)
    found["rates.csv"] = Table.of({"why": why} | vars(r) for why, own in tried.items() for r in own)
    shown = {"contrasts": contrasts.table(record), "widths": widths.table(record), "time": clock.table(record)}
    shown["replaced"] = rates.replaced_table(record)
    found |= {f"{name}.csv": own for name, own in shown.items() if own}
    return {name: own for name, own in found.items() if isinstance(own, str) or own.rows}


def _summary(record: Comparison) -> Iterator[Mapping[str, Cell]]:
    p = record.protocol
    for row, line in each(by_row(record)):
        what = {key: getattr(line.what, key) for key in ("system", "width", "steps", "learning_rate")}
        seconds = _mean(record.seconds(line.trained))
        loss = tables.contrast_numbers(line.loss)
        if p.contrasts:  # which are the only family of tests
            loss = {key: value for key, value in loss.items() if key not in ("p", "p_holm")}
        cells = {"row": row, **what, **loss, "seconds_per_step": seconds, **asdict(line.cost)}
        cells |= {"flops_in_all": line.flops, "tokens_in_all": line.cost.tokens * line.steps}
        for target in p.targets:
            cells |= {f"{key} to {target:g}": value for key, value in reached(record, line, target).items()}
        yield cells
