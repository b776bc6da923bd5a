"""Tables of the ablations, from their JSON alone: Markdown and CSV."""

from pathlib import Path
from typing import Any

from experiments.ablations.summary import Line, Record, lines, places, read
from experiments.csv_file import write_csv as write_rows
from experiments.markdown import count, markdown_table, number
from experiments.statistics import Contrast
from experiments.study import in_words

LOSS = ("arm", "trained", "evaluations", "rate", "loss", "SD", "minus", "p (Holm)", "d_z", "ms per step")


def markdown(record: Record) -> str:
    """Protocol and the tables of all groups."""
    groups = record["protocol"]["groups"]
    return "\n".join(["# Ablations", "", protocol(record), *("\n" + group(record, name) for name in groups)]) + "\n"


def protocol(record: Record) -> str:
    """What was done, as a Markdown list."""
    p = record["protocol"]
    tokens = p["tokens_per_step"]
    first = p["read_batches"] or p["report_batches"]
    read = f"the first {first * tokens:,} tokens, if it has so many," if first else "all"
    return in_words(
        record,
        trainings=f"Trainings of {' or '.join(str(s) for s in p['steps'])} steps of {tokens:,} tokens.",
        each="each arm",
        paired="against the reference of the group; p corrected by Holm over the arms of a group (readings: over all"
        " arms and places of the group)",
        more=[
            "Evaluations: of blocks for a token in training, the mean where their number is drawn. An arm that stands"
            " in several groups was trained once.",
            f"Readings by other solvers and in other numbers of steps are of {read} of the part `report`, without"
            " training.",
        ],
    )


def group(record: Record, name: str) -> str:
    """The tables of one group."""
    about, found = record["protocol"]["groups"][name], lines(record, name)
    head = [f"minus {about['reference']}" if cell == "minus" else cell for cell in LOSS]
    text = [f"## {name} (n = {found[0].loss.mean.n})", "", f"{about['question']} All begin with {about['begins']}.", ""]
    text += [f"- {line.arm}: {line.settings or 'nothing changed'}" for line in found]
    text += ["", *markdown_table(head, [_cells(line) for line in found])]
    at = places(record, name)
    if at:
        against, moved = read(record, name), read(record, name, "displacement")
        heads = [f"{solver} {steps}" for solver, steps in at]
        for words, cell in (
            ("Loss, read by solver and number of steps:", lambda key: str(against[key].mean)),
            (f"Minus {about['reference']} read there too; p (Holm):", lambda key: _difference(against[key])),
            ("Displacement of the flow, ||x(1) - x(0)|| / ||x(0)||:", lambda key: str(moved[key].mean)),
        ):
            rows = [[arm, *(cell((place, arm)) for place in at)] for arm in about["arms"]]
            text += ["", words, "", *markdown_table(["arm", *heads], rows)]
    return "\n".join(text)


def write_csv(record: Record, summary: Path, runs: Path) -> None:
    """summary: a line for each arm of each group, as trained and at each place of reading. runs: for each training."""
    rows = []
    for name, about in record["protocol"]["groups"].items():
        for line in lines(record, name):
            what = {"parameters": line.parameters, "evaluations": line.evaluations, "learning_rate": line.learning_rate}
            rows.append({"group": name, "arm": line.arm, "read": "as trained", **what, **_plain(line.loss)})
        for ((solver, steps), arm), contrast in read(record, name).items() if about["places"] else ():
            rows.append({"group": name, "arm": arm, "read": f"{solver} {steps}", **_plain(contrast)})
    write_rows(summary, rows)
    write_rows(runs, record["results"])


def _cells(line: Line) -> list[str]:
    test, p = line.loss.test, line.loss.p_holm
    return [
        line.arm,
        count(line.parameters),
        f"{line.evaluations:g}",
        f"{line.learning_rate:g}",
        str(line.loss.mean),
        f"{line.loss.mean.sd:.3f}",
        str(line.loss.difference or ""),
        "" if p is None else number(p),
        "" if test is None else number(test.effect),
        f"{1000 * line.seconds.mean:.1f} ± {1000 * line.seconds.half:.1f}",
    ]


def _difference(contrast: Contrast) -> str:
    return "" if contrast.p_holm is None else f"{contrast.difference}; {number(contrast.p_holm)}"


def _plain(contrast: Contrast) -> dict[str, Any]:
    """A contrast as numbers."""
    low, high = contrast.mean.bounds
    cells: dict[str, Any] = {"n": contrast.mean.n, "loss": contrast.mean.mean, "sd": contrast.mean.sd}
    cells |= {"low": low, "high": high}
    if contrast.difference is not None and contrast.test is not None:
        low, high = contrast.difference.bounds
        cells |= {"difference": contrast.difference.mean, "difference_low": low, "difference_high": high}
        cells |= {"t": contrast.test.t, "df": contrast.test.df, "p": contrast.test.p, "p_holm": contrast.p_holm}
        cells |= {"d_z": contrast.test.effect}
    return cells
