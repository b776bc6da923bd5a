"""Tables of the comparison, from its JSON alone: Markdown, LaTeX and CSV."""

from pathlib import Path
from typing import Any

from experiments.compare.config import ROWS, SAME_FLOPS
from experiments.compare.summary import Line, Record, lines
from experiments.csv_file import write_csv as write_rows
from experiments.markdown import count, markdown_table, number
from experiments.study import in_words

LOSS = ("model", "width", "trained", "materialised", "steps", "FLOPs", "rate", "loss", "SD", "minus", "p (Holm)", "d_z")
COST = ("model", "width", "steps", "ms per step", "peak MiB")


def protocol(record: Record) -> str:
    """What was done, as a Markdown list."""
    p = record["protocol"]
    tokens = p["tokens_per_step"]
    return in_words(
        record,
        trainings=f"Trainings of {p['steps']} steps (where steps are equal) of {tokens:,} tokens,"
        f" {p['steps'] * tokens:,} tokens in all.",
        each="each model in each size",
        paired=f"against {p['reference']}; p corrected by Holm over the models of a row",
        more=[
            "Nearly the same number of FLOPs: the nearest number of steps, but that of the others where it would change"
            f" by less than {SAME_FLOPS:.0%}. Of parameters: the nearest width, in steps of the heads.",
            "FLOPs: matrix products forward and backward and generation of weights, nothing recomputed. Memory: a"
            " training step by XLA's count. Times: of this machine, with whatever else it did.",
        ],
    )


def markdown(record: Record) -> str:
    """Protocol and all tables."""
    found, n = lines(record), len(record["protocol"]["seeds"])
    text = ["# Comparison", "", protocol(record)]
    text += ["", losses(record)]
    text += ["", "## Speed, memory, and the way to given losses", ""]
    distances = " or ".join(map(str, sorted({r["curve"][0][0] for r in record["results"]})))
    text += [
        "Steps, seconds and FLOPs until the loss on the part `select` is first read at or below a given one; means over"
        f" the seeds that get there. It is read after every {distances} steps: what trains for another number"
        " of steps is read elsewhere.",
        "",
    ]
    targets = [f"to {t:g}: steps, s, FLOPs" for t in record["protocol"]["targets"]]
    text += markdown_table([*COST, *targets], [_cost_cells(line, n) for line in found])
    return "\n".join(text) + "\n"


def losses(record: Record) -> str:
    """The tables of losses, which the same command makes again to the last digit."""
    text = []
    for row, found in _by_row(record).items():
        text += [f"## At {ROWS[row]} (n = {len(record['protocol']['seeds'])})", ""]
        text += [*markdown_table(_head(record), [_loss_cells(line) for line in found]), ""]
    return "\n".join(text).rstrip()


def latex(record: Record) -> str:
    """The tables of losses as one `tabular` with rules of booktabs."""
    n = len(record["protocol"]["seeds"])
    body = []
    for row, found in _by_row(record).items():
        body += [r"\midrule", rf"\multicolumn{{{len(LOSS)}}}{{l}}{{At {_latex(ROWS[row])} ($n = {n}$)}} \\"]
        body += [" & ".join(_latex(cell) for cell in _loss_cells(line)) + r" \\" for line in found]
    head = " & ".join(_latex(cell) for cell in _head(record)) + r" \\"
    frame = [rf"\begin{{tabular}}{{l{'r' * (len(LOSS) - 1)}}}", r"\toprule", head]
    return "\n".join([*frame, *body, r"\bottomrule", r"\end{tabular}"]) + "\n"


def write_csv(record: Record, summary: Path, runs: Path) -> None:
    """summary: a line for each system in each row. runs: a line for each training."""
    write_rows(summary, [_plain(line) for line in lines(record)])
    write_rows(runs, [r | {"rows": " ".join(r["rows"])} for r in record["results"]])


def _by_row(record: Record) -> dict[str, list[Line]]:
    by_row: dict[str, list[Line]] = {}
    for line in lines(record):
        by_row.setdefault(line.row, []).append(line)
    return by_row


def _head(record: Record) -> list[str]:
    return [f"minus {record['protocol']['reference']}" if cell == "minus" else cell for cell in LOSS]


def _loss_cells(line: Line) -> list[str]:
    test = line.test
    return [
        line.system,
        str(line.width),
        count(line.cost["parameters"]),
        count(line.cost["materialised"]),
        str(line.steps),
        f"{line.cost['flops_in_all']:.3g}",
        f"{line.learning_rate:g}",
        str(line.loss),
        f"{line.loss.sd:.3f}",
        str(line.difference or ""),
        "" if line.p_holm is None else number(line.p_holm),
        "" if test is None else number(test.effect),
    ]


def _cost_cells(line: Line, n: int) -> list[str]:
    cells = [
        f"{line.system} ({line.row})",
        str(line.width),
        str(line.steps),
        f"{1000 * line.seconds.mean:.1f} ± {1000 * line.seconds.half:.1f}",
        f"{line.cost['memory'] / 2**20:.0f}",
    ]
    for r in line.reached:
        few = "" if r.n == n else f" ({r.n} of {n} seeds)"
        cells.append(f"{r.steps:.0f}, {r.seconds:.0f}, {r.flops:.2g}{few}" if r.n else "not reached")
    return cells


def _plain(line: Line) -> dict[str, Any]:
    """A line as numbers."""
    low, high = line.loss.bounds
    cells: dict[str, Any] = {
        "row": line.row,
        "system": line.system,
        "width": line.width,
        "steps": line.steps,
        "learning_rate": line.learning_rate,
        "n": line.loss.n,
        "loss": line.loss.mean,
        "sd": line.loss.sd,
        "low": low,
        "high": high,
        "seconds_per_step": line.seconds.mean,
        **line.cost,
    }
    if line.difference is not None and line.test is not None:
        low, high = line.difference.bounds
        cells |= {"difference": line.difference.mean, "difference_low": low, "difference_high": high}
        cells |= {
            "t": line.test.t,
            "df": line.test.df,
            "p": line.test.p,
            "p_holm": line.p_holm,
            "d_z": line.test.effect,
        }
    for r in line.reached:
        cells |= {f"{what} to {r.target:g}": getattr(r, what) for what in ("n", "steps", "seconds", "flops")}
    return cells


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
_LATEX |= {mark: rf"\{mark}" for mark in "_%&#${}"}


def _latex(cell: str) -> str:
    return "".join(_LATEX.get(mark, mark) for mark in cell)
