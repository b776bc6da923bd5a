"""The page of the comparison and its tables, from the record alone."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from experiments import tables
from experiments.compare import clock, contrasts, rates, widths
from experiments.compare.plan import ROWS, SAME_FLOPS
from experiments.compare.record import Comparison, by_row, each, missing, seeds_of
from experiments.lines import Line, against, known, table
from experiments.statistics import interval
from experiments.tables import Cell, Table


def reached(line: Line, target: float) -> dict[str, float]:
    """When the loss on the part `select` first reaches `target`: the number of trainings that reach it, and the mean
    steps, seconds and FLOPs of these; nan if there are none."""
    there = line.reaches(target)
    n, no = len(there), math.nan
    steps = sum(step for step, _ in there) / n if n else no
    seconds = sum(step * r.seconds_per_step for step, r in there) / n if n else no
    return {"n": n, "steps": steps, "seconds": seconds, "flops": steps * line.cost.flops}


def page(record: Comparison) -> Mapping[str, object]:
    p, rows, rest = record.protocol, by_row(record), missing(record.progress)

    def way(line: Line, target: float) -> str:
        r, n = reached(line, target), line.loss.mean.n
        few = "" if r["n"] == n else f" ({r['n']} of {n} seeds)"
        return "{steps:.0f}, {seconds:.0f}, {flops:.2g}".format(**r) + few if r["n"] else "not reached"

    ways = {f"to {t:g}: steps, s, FLOPs": lambda line, t=t: way(line, t) for t in p.targets}
    costs = {f"{line.what.system} ({row})": line for row, line in each(rows)}
    found = [f"## {title} (n = {seeds_of({row: rows[row]})})\n\n{own}" for row, title, own in losses(record)]
    return {
        "missing": f"{rest}\n\n" if rest else "",
        "tokens": p.steps * p.tokens_per_step,
        "read": _read(record),
        "rates": p.about_search if p.search_width else p.about_rates("each model in each size"),
        "tests": "p is Holm-corrected over the models of a row"
        if not p.contrasts
        else "the only tests are those of the contrasts",
        "same": SAME_FLOPS,
        "contrasts": contrasts.section(record) + _published(record) + _against_counts(record),
        "losses": "\n\n".join(found) or "None yet.",
        "distances": " or ".join(map(str, sorted({r.curve[0][0] for r in record.results}))),
        "costs": table("model", costs, known("width", "steps", "ms per step", "peak MiB"), ways),
        "more": clock.section(record) + widths.section(record) + rates.section(record),
    }


def losses(record: Comparison) -> list[tuple[str, str, Table]]:
    """For each row its title and table of losses, which the same command reproduces to the last digit."""
    p, rows, found = record.protocol, by_row(record), []
    loss = against(p.reference)
    if p.contrasts:
        del loss["p (Holm)"]
    for row, own in rows.items():
        n = {} if seeds_of({row: own}) == str(p.n) else {"n": lambda line: line.loss.mean.n}
        columns = known("width", "trained", "materialised", "steps", "FLOPs", "rate")
        found.append((row, f"At {ROWS[row]}", table("model", own, columns, n, loss)))
    return found


def _read(record: Comparison) -> str:
    """How often the longest training reads its text; empty where the page makes no point of it."""
    p = record.protocol
    if p.ngrams is None or not record.results:
        return ""
    longest, once = max(record.results, key=lambda r: r.steps), p.tokens_per_step / p.bytes["train"]
    more = f"; the longest, {longest.system} with {longest.steps:,} steps, {longest.steps * once:.2f} times"
    return f" They read the text {p.steps * once:.2f} times{more if longest.steps > p.steps else ''}."


def _against_counts(record: Comparison) -> str:
    """Each system beside n-grams counted in as much text; empty if nothing is asked."""
    p, found = record.protocol, record.losses()
    if p.ngrams is None or not found:
        return ""
    level, rows = p.counts["report"][str(p.ngrams)], []
    for name, own in found.items():
        below = interval([loss - level for loss in own.values()])
        low, high = below.bounds
        verdict = "yes" if high < 0 else "no" if low > 0 else "open"
        rows.append([name, below.n, interval(list(own.values())), below, verdict])
    words = f"{p.ngrams}-grams counted in as much text reach {level:.3f}."
    head = ["model", "n", "loss", f"minus {p.ngrams}-grams", f"beats {p.ngrams}-grams"]
    return f"## Beside counts\n\n{words}\n\n{Table(head, rows)}\n\n"


def _published(record: Comparison) -> str:
    """Published numbers beside those found; empty without any."""
    p, found = record.protocol, record.losses()
    if p.published is None:
        return ""
    rows: list[list[Cell]] = []
    for name in p.names:
        told = p.published.losses.get(name)
        here = interval(list(found[name].values())) if name in found else None
        rows.append([name, "" if told is None else f"{told:.3f}", "" if here is None else here, here.n if here else 0])
    table = Table(["model", "published", "here", "n"], rows)
    return f"## Beside published numbers\n\n{p.published.about}\n\n{table}\n\n"


def files(record: Comparison) -> dict[str, str | Table]:
    """The tables of losses in LaTeX; CSV with a line for each system in each row, for each training, and for each
    contrast, width, time and rate where the page shows them."""
    p, rows = record.protocol, by_row(record)
    titled = {
        f"{tables.in_latex(title)} ($n = {seeds_of({row: rows[row]})}$)": own for row, title, own in losses(record)
    }
    found: dict[str, str | Table] = {"table.tex": tables.latex(titled)} if titled else {}
    runs = [vars(r) | {"rows": " ".join(r.rows), "machine": r.machine or None} for r in record.results]
    lines = {"summary.csv": _summary(record), "runs.csv": runs, "contrasts.csv": contrasts.numbers(record)}
    lines |= {"widths.csv": widths.numbers(record)}
    if p.search_width is not None:
        lines["rates.csv"] = rates.numbers(record)
    if clock.section(record):
        lines["time.csv"] = clock.numbers(record)
    made = {name: Table.of(own) for name, own in lines.items()}
    return found | {name: own for name, own in made.items() if own.rows}


def _summary(record: Comparison) -> Iterator[Mapping[str, Cell]]:
    p = record.protocol
    for row, line in each(by_row(record)):
        what = {key: getattr(line.what, key) for key in ("system", "width", "steps", "learning_rate")}
        seconds = interval([r.seconds_per_step for r in line.trained]).mean
        loss = tables.contrast_numbers(line.loss)
        if p.contrasts:  # which are the only family of tests
            loss = {key: value for key, value in loss.items() if key not in ("p", "p_holm")}
        cells = {"row": row, **what, **loss, "seconds_per_step": seconds, **asdict(line.cost)}
        cells |= {"flops_in_all": line.flops, "tokens_in_all": line.cost.tokens * line.steps}
        for target in p.targets:
            cells |= {f"{key} to {target:g}": value for key, value in reached(line, target).items()}
        yield cells
