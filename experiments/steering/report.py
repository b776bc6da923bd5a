"""Tables and figure of steering, from its JSON alone."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from experiments.csv_file import write_csv as write_rows
from experiments.markdown import markdown_table, number
from experiments.results import made_by
from experiments.statistics import LEVEL, Contrast, contrasts, interval

Record = dict[str, Any]


def values(record: Record, arm: str, *keys: str) -> dict[int, float]:
    """seed -> the number under `keys`, of one arm."""
    found = {}
    for result in record["results"]:
        if result["arm"] == arm:
            value = result
            for key in keys:
                value = value[key]
            found[result["seed"]] = value
    return found


def accuracies(record: Record) -> dict[str, Contrast]:
    """Of samples, against chance; the arms are one family of tests."""
    own = {arm: values(record, arm, "accuracy") for arm in record["arms"]}
    chance = {seed: 0.5 for seed in record["protocol"]["seeds"]}
    return contrasts({**own, "chance": chance}, lambda arm: "chance")


def losses(record: Record) -> dict[tuple[str, str], Contrast]:
    """(arm, control) -> loss, against the right control; all are one family of tests."""
    own = {
        (arm, kind): values(record, arm, "losses", kind)
        for arm in record["arms"]
        for kind in ("right", "wrong", "none")
    }
    return contrasts(own, lambda key: (key[0], "right"))


def markdown(record: Record) -> str:
    """Protocol and all tables."""
    p, judge = record["protocol"], record["judge"]
    a, b = (text["name"] for text in record["texts"])
    n = len(p["seeds"])
    right, heard = accuracies(record), losses(record)
    lines = ["# Steering", "", protocol(record), "", f"## Does control choose the text? (n = {n} seeds)", ""]
    rows = []
    for arm in record["arms"]:
        found = right[arm]
        swapped = interval([1 - x for x in values(record, arm, "accuracy").values()])
        p_holm = "" if found.p_holm is None else number(found.p_holm)
        rows.append([arm, str(found.mean), str(swapped), str(found.difference), p_holm])
    rows.append([f"real text ({judge['pieces']} pieces): upper bound", f"{judge['accuracy']:.3f}", "", "", ""])
    rows.append(["chance", "0.500", "0.500", "", ""])
    head = ["model", "judged as the text asked for", "with the other text's control", "minus chance", "p (Holm)"]
    lines += [
        *markdown_table(head, rows),
        "",
        f"## Share judged as {b}, on the way from {a} (u = 0) to {b} (u = 1)",
        "",
    ]
    ways = [*map(str, p["between"]), "none"]
    rows = [
        [arm, *(str(interval(list(values(record, arm, "judged_b", u).values()))) for u in ways)]
        for arm in record["arms"]
    ]
    head = ["model", *(f"u = {u}" for u in p["between"]), "no control"]
    lines += [*markdown_table(head, rows), "", "## Loss on the part `report` of both texts (nats per byte)", ""]
    rows = [
        [arm, kind, str(found.mean), str(found.difference or ""), "" if found.p_holm is None else number(found.p_holm)]
        for (arm, kind), found in heard.items()
    ]
    lines += markdown_table(["model", "control", "loss", "minus right control", "p (Holm)"], rows)
    lines += ["", f"## The first samples of seed {p['seeds'][0]}, `steered`", ""]
    first = next(r for r in record["results"] if r["arm"] == "steered")
    lines += [
        f"- {'no control' if u == 'none' else f'u = {u}'}: {text!r}" for u in ways for text in first["examples"][u]
    ]
    return "\n".join(lines) + "\n"


def protocol(record: Record) -> str:
    """What was done, as a Markdown list."""
    p = record["protocol"]
    a, b = record["texts"]
    texts = "; ".join(
        f"{letter}: {text['name']} ({', '.join(f'{part} {what}' for part, what in text['parts'].items())})"
        for letter, text in (("A", a), ("B", b))
    )
    return "\n".join(
        [
            f"- Texts {texts}. As many records of {p['record']} characters from both, in random order; control (1, 0)"
            f" for A, (0, 1) for B, none for {p['without_control']:.0%} of them.",
            *(f"- `{arm}`: {words}." for arm, words in record["arms"].items()),
            f"- {p['samples']} samples of {p['length']} bytes with each control and seed, temperature"
            f" {p['temperature']:g}, from the token that ends a document, which comes as often in both texts.",
            "- The judge counts byte 4-grams of the parts `select`, which no model was trained on; it hears spelling"
            " and layout, not sense. Its accuracy on pieces of the parts `report`, as long, is the upper bound.",
            f"- {p['steps']} training steps, learning rate {p['learning_rate']:g}, not searched for; nothing is chosen"
            " by the parts `report`. The model is that after the last step, and passed the test of causality.",
            f"- Intervals: {LEVEL:.0%}, Student's t over {len(p['seeds'])} seeds ({', '.join(map(str, p['seeds']))});"
            " tests are paired by seed, p corrected by Holm over each table.",
            f"- {made_by(record)}",
        ]
    )


def write_csv(record: Record, path: Path) -> None:
    """A line for each training."""
    rows = []
    for r in record["results"]:
        row = {key: value for key, value in r.items() if not isinstance(value, dict)}
        row |= {f"loss {kind}": loss for kind, loss in r["losses"].items()}
        rows.append(row | {f"judged_b {u}": share for u, share in r["judged_b"].items()})
    write_rows(path, rows)


def draw(record: Record, path: Path) -> None:
    """Left: share judged as B against u. Right: loss under right, wrong and no control. Bars: intervals over seeds."""
    p, judge, heard = record["protocol"], record["judge"], losses(record)
    b = record["texts"][1]["name"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for index, arm in enumerate(record["arms"]):
        own = [interval(list(values(record, arm, "judged_b", str(u)).values())) for u in p["between"]]
        style = {"color": f"C{index}", "capsize": 3}
        where = [u + 0.015 * index for u in p["between"]]
        left.errorbar(where, [i.mean for i in own], yerr=[i.half for i in own], fmt="o-", label=arm, **style)
        none = interval(list(values(record, arm, "judged_b", "none").values()))
        left.errorbar(1.2 + 0.015 * index, none.mean, yerr=none.half, fmt="o", **style)
        for place, kind in enumerate(("right", "wrong", "none")):
            mean = heard[arm, kind].mean
            label = arm if place == 0 else None
            right.errorbar(place + 0.15 * index, mean.mean, yerr=mean.half, fmt="o", label=label, **style)
    for share, words in zip(judge["shares"], ("A", "B"), strict=True):
        left.axhline(share, color="grey", linestyle=":", linewidth=0.9)
        left.annotate(f"real {words}", (0.5, share), fontsize=7, ha="center", va="bottom" if share < 0.5 else "top")
    left.axhline(0.5, color="black", linewidth=0.8)
    left.set_xticks([*p["between"], 1.2], [*map(str, p["between"]), "no control"], fontsize=8)
    left.set(xlabel="control (1 - u, u)", ylabel=f"share of samples judged as {b}", ylim=(-0.05, 1.05))
    right.set_xticks([0, 1, 2], ["right", "wrong", "none"])
    right.set(xlabel="control", ylabel="loss on unseen text (nats per byte)")
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle(f"n = {len(p['seeds'])} seeds, {p['samples']} samples each, 95 % intervals", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)
