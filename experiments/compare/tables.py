"""Tables of the comparison, from its JSON alone: Markdown, LaTeX and CSV."""

import csv
from pathlib import Path
from typing import Any

from experiments.compare.config import ROWS
from experiments.compare.summary import Line, Record, lines
from experiments.markdown import markdown_table, number
from experiments.statistics import LEVEL

LOSS = ("model", "width", "trained", "materialised", "steps", "FLOPs", "rate", "loss", "SD", "minus", "p (Holm)", "d_z")
COST = ("model", "width", "steps", "ms per step", "peak MiB")


def protocol(record: Record) -> str:
    """What was done, as a Markdown list."""
    p = record["protocol"]
    parts = ", ".join(f"{part}: {p['parts'][part]} ({p['bytes'][part]:,} bytes)" for part in p["parts"])
    rates = ", ".join(f"{r:g}" for r in p["learning_rates"])
    chosen = (
        f"the one of {rates} with the lowest loss on `select` at the end of trainings with seeds"
        f" {', '.join(map(str, p['selection_seeds']))}, for each model in each size"
        if len(p["learning_rates"]) > 1
        else rates or "that of each configuration, not searched for"
    )
    first = (p["report_batches"] or 0) * p["tokens_per_step"]
    read = f"its first {first:,} tokens, if it has so many" if first else "all of it"
    return "\n".join(
        [
            f"- Text {p['text']}: {parts}. Nothing is chosen by the part `report`, which is read once, after the last"
            f" step ({read}).",
            f"- Tokenizer {p['tokenizer']}; loss in nats per token. Trainings of {p['steps']} steps (where steps are"
            f" equal) of {p['tokens_per_step']:,} tokens, {p['steps'] * p['tokens_per_step']:,} tokens in all.",
            f"- Learning rate: {chosen}. The model is that after the last step; no step is chosen.",
            f"- {len(p['seeds'])} seeds ({', '.join(map(str, p['seeds']))}). A seed settles initial weights and the"
            " order of the text, which is the same for all models.",
            f"- Intervals: {LEVEL:.0%}, Student's t; SD of the sample. Differences, tests and d_z are paired by seed,"
            f" against {p['reference']}; p corrected by Holm over the models of a row.",
            "- Each model passed the test of causality after training: a token is changed, all logits before it stay as"
            " they are, bit for bit.",
            "- FLOPs: matrix products forward and backward and generation of weights, nothing recomputed. Memory: a"
            " training step by XLA's count. Times: of this machine, with whatever else it did.",
            f"- {record['machine']['device']}, {record['machine']['cores']} cores, JAX {record['machine']['jax']},"
            f" {record['date']}. Command: `{record['command']}`",
        ]
    )


def markdown(record: Record) -> str:
    """Protocol and all tables."""
    found, n = lines(record), len(record["protocol"]["seeds"])
    text = ["# Comparison", "", protocol(record)]
    text += ["", losses(record)]
    text += ["", "## Speed, memory, and the way to given losses", ""]
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
        body += [r"\midrule", rf"\multicolumn{{{len(LOSS)}}}{{l}}{{At {ROWS[row]} ($n = {n}$)}} \\"]
        body += [" & ".join(_latex(cell) for cell in _loss_cells(line)) + r" \\" for line in found]
    head = " & ".join(_latex(cell) for cell in _head(record)) + r" \\"
    frame = [rf"\begin{{tabular}}{{l{'r' * (len(LOSS) - 1)}}}", r"\toprule", head]
    return "\n".join([*frame, *body, r"\bottomrule", r"\end{tabular}"]) + "\n"


def write_csv(record: Record, summary: Path, runs: Path) -> None:
    """summary: a line for each system in each row. runs: a line for each training."""
    rows = [_plain(line) for line in lines(record)]
    _write_csv(summary, rows)
    scalars = [
        {k: v for k, v in r.items() if not isinstance(v, list)} | {"rows": " ".join(r["rows"])}
        for r in record["results"]
    ]
    _write_csv(runs, scalars)


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
        _count(line.cost["parameters"]),
        _count(line.cost["materialised"]),
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


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _latex(cell: str) -> str:
    return cell.replace("_", r"\_").replace("±", r"$\pm$")


def _count(n: float) -> str:
    return f"{n / 1e6:.2f}M" if n >= 1e5 else f"{n / 1e3:.1f}k"
