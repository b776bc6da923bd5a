"""The text of the results, from the JSON alone: protocol, losses, norms, verdict, control, readings; as Markdown."""

import statistics
from typing import Any

from experiments.gradient_flow.config import SYSTEMS
from experiments.gradient_flow.invariance import SHARE, passes
from experiments.gradient_flow.norms import EXPLODING, RELATIVE, VANISHING
from experiments.gradient_flow.summary import Record, by_seed, clipped_share, losses, norms, of_system, verdicts
from experiments.gradient_flow.verdict import CANNOT_SHOW, GRADIENT, LOSS_RATIO
from experiments.markdown import markdown_table, number
from experiments.results import made_by
from experiments.statistics import LEVEL, Interval, interval, paired, paired_test

_LABELS = {
    ("baseline", "flow"): "layers in its place",
    ("shallow", "flow"): "later layers",
    ("shallow", "coda"): "last norm",
}


def markdown(record: Record) -> str:
    """All of it."""
    parts = [_protocol, _losses, _norms, _verdict, _control, _solvers, _refined]
    return "\n\n".join(["# Gradient flow", *(part(record) for part in parts)]) + "\n"


def _protocol(record: Record) -> str:
    p = record["protocol"]
    parts = ", ".join(f"{part}: {p['parts'][part]} ({p['bytes'][part]:,} bytes)" for part in p["parts"])
    first = (p["report_batches"] or 0) * p["tokens_per_step"]
    read = f"its first {first:,} tokens, if it has so many" if first else "all of it"
    systems = "; ".join(f"{name}, {SYSTEMS[name]}" for name in p["systems"])
    return "\n".join(
        [
            f"- {systems}. The baseline has {p['replaced_layers']} ordinary layers in place of the flow.",
            f"- Text {p['text']}: {parts}. Tokenizer {p['tokenizer']}. Nothing is chosen; losses of trained models and"
            f" all readings are on the part `report` ({read}), in nats per token.",
            f"- {p['num_train_steps']} steps of {p['tokens_per_step']:,} tokens; optimizer {p['optimizer']}; weight"
            f" decay on: {p['weight_decay_on']}. The model is that after the last step.",
            f"- n = {len(p['seeds'])} seeds ({', '.join(map(str, p['seeds']))}). A seed settles the order of the text"
            " and initial weights; those of embeddings, prelude and coda are the same in hybrid and baseline.",
            f"- Intervals: {LEVEL:.0%}, Student's t over seeds. Differences and tests are paired by seed.",
            "- Norms are of the gradient as it comes, before clipping, in every step, by Levanter's `trainer.watch`.",
            "- Differs from the seed: the head is tied to the embeddings (their norm is that of both), no dropout, and"
            " the text is read in its order of training instead of at random places.",
            "- Each model passed the test of causality after training.",
            f"- {made_by(record)}",
        ]
    )


def _losses(record: Record) -> str:
    head = ["model", "trained parameters", "training loss at the end", "reported loss", "minus baseline"]
    rows = []
    for line in losses(record):
        test = line.test
        cells = [line.system, f"{line.parameters:,}", str(line.training), str(line.reported)]
        cells += [str(line.difference or ""), "" if line.p_holm is None else number(line.p_holm)]
        rows.append([*cells, "" if test is None else number(test.effect)])
    last = record["protocol"]["final_steps"]
    return _section(
        f"Losses (n = {_n(record)})",
        [*head, "p (Holm)", "d_z"],
        rows,
        f"Training loss: mean of the last {last} steps. Frequencies of single tokens, counted in the training text,"
        f" reach {record['unigram']:.3f} on the part `report`.",
    )


def _norms(record: Record) -> str:
    head = ["model", "component", "median", "largest", "share of total", f"< {VANISHING:g}", f"< {RELATIVE:g} of total"]
    rows = []
    for line in norms(record):
        name = _LABELS.get((line.system, line.component), line.component)
        c = line.counts
        cells = [line.system, name, *(_small(i) for i in (line.median, line.largest, line.share))]
        rows.append([*cells, *(f"{k} of {line.steps}" for k in (c.vanishing, c.relative, c.exploding, c.not_finite))])
    ratios = by_seed(record, "hybrid", lambda r: statistics.median(r["norms"]["flow"]))
    layers = by_seed(record, "baseline", lambda r: statistics.median(r["norms"]["flow"]))
    ratio = interval([ratios[seed] / layers[seed] for seed in ratios])
    clip = ", ".join(f"{name} {clipped_share(record, name)}" for name in record["protocol"]["systems"])
    return _section(
        f"Norms of the gradient before clipping (n = {_n(record)})",
        [*head, f"> {EXPLODING:g}", "not finite"],
        rows,
        f"Counts are of steps, all seeds together. Vanishing below {VANISHING:g} and exploding above {EXPLODING:g} is"
        " the seed's rule (applied there to the flow after clipping, when nothing can be above the limit); below"
        f" {RELATIVE:g} of the total norm of the same step is ours, which does not depend on the scale of the loss."
        f" Flow against the layers that it replaces, ratio of medians: {ratio}. Share of steps that were clipped:"
        f" {clip}.",
    )


def _verdict(record: Record) -> str:
    rows = []
    for name in record["protocol"]["systems"]:
        if name == "baseline":
            continue
        found = verdicts(record, name)
        gradients = [v.gradient for v in found if v.gradient is not None]
        gradient = str(interval(gradients)) if gradients else "has no flow"
        passed = sum(v.passes for v in found)
        rows.append([name, str(interval([v.ratio for v in found])), gradient, f"{passed} of {len(found)} seeds"])
    text = [
        f"The seed's rule: loss ratio (training loss at the end, to that of the baseline) < {LOSS_RATIO}, and mean norm"
        f" of the flow's gradient, after clipping, > {GRADIENT}. What it cannot show:",
        "",
        *(f"- {sentence}" for sentence in CANNOT_SHOW),
    ]
    head = ["model", "loss ratio", "mean gradient of the flow", "passes"]
    return _section(f"Verdict by the seed's rule (n = {_n(record)})", head, rows, "\n".join(text))


def _control(record: Record) -> str:
    own = of_system(record, "hybrid")
    rows = []
    for name in ("trained", "untrained"):
        values = ([r["control"][name][key] for r in own] for key in ("difference", "divergence", "loss_change"))
        rows.append([f"{name}, never given a control", *(_small(interval(list(v))) for v in values)])
    largest = max(r["control_gradient"] for r in own)
    head = ["hybrid", "mean difference of logits", "relative", "change of the loss"]
    alpha = interval([r["alpha"] for r in own])
    return _section(
        f"A random control, against none (n = {_n(record)})",
        head,
        rows,
        "The seed took a nonzero difference as a sign that control works. Neither model ever was given one: the largest"
        f" gradient that the matrix of the control had in training is {largest:g}, so it still is as it was drawn (but"
        " for weight decay), and what it does is what random numbers do. An untrained model shows a difference too. A"
        " control that means something is trained with: experiments.steering. (alpha was"
        f" {record['protocol']['alpha']:g} at first, and is {alpha} after training.)",
    )


def _solvers(record: Record) -> str:
    own, rows = of_system(record, "hybrid"), []
    trained = interval([r["report_loss"] for r in own])
    for index, first in enumerate(own[0]["readings"]):
        each = [r["readings"][index] for r in own]
        change = [reading["loss"] - r["report_loss"] for reading, r in zip(each, own, strict=True)]
        cells = [first["solver"], str(first["steps"]), str(first["evaluations"]), _small(interval(change))]
        rows.append([*cells, *(_small(interval([e[key] for e in each])) for key in ("divergence", "displacement"))])
    head = ["solver", "steps", "evaluations", "loss minus as trained", "divergence of logits", "displacement"]
    return _section(
        f"The trained flow with other solvers (n = {_n(record)})",
        head,
        rows,
        f"Trained with euler, {record['protocol']['flow_steps']} steps; loss {trained}. Divergence of logits:"
        " ||l - l_0|| / ||l_0||, l_0 as trained, both centred over the vocabulary. Displacement of the flow:"
        " ||x(1) - x(0)|| / ||x(0)||.",
    )


def _refined(record: Record) -> str:
    rows = []
    for name in ("hybrid", "baseline"):
        own = [r["refined"] for r in of_system(record, name)]
        reported = [r["report_loss"] for r in of_system(record, name)]
        moved = _small(interval([r["displacement"] for r in own]))

        def cells(words: str, each: list[dict[str, Any]], name=name, moved=moved, reported=reported) -> list[str]:
            change = [e["loss"] - loss for e, loss in zip(each, reported, strict=True)]
            shares = [e.get("share", 1.0) for e in each]
            values = (change, [e["divergence"] for e in each], shares)
            return [name, words, moved, *(_small(interval(v)) for v in values)]

        rows.append(cells("left out", [r["left_out"] for r in own]))
        for index, first in enumerate(own[0]["refined"]):
            rows.append(cells(f"steps of 1/{first['factor']}", [r["refined"][index] for r in own]))
    passed = {name: sum(passes(r["refined"]) for r in of_system(record, name)) for name in ("hybrid", "baseline")}
    words = ", ".join(f"{name} {k} of {_n(record)} seeds" for name, k in passed.items())
    return _section(
        f"Smaller steps, and a negative control (n = {_n(record)})",
        ["model", "its middle", "displacement", "loss minus as trained", "divergence of logits", "share"],
        rows,
        "The middle of each model in Euler steps of 1/m of the trained length: the flow's, and as negative control the"
        " baseline's ordinary layers in its place, each applied m times as x + B(x)/m, which nothing in training asked"
        " for. Share: divergence, of that of the model with its middle left out. By our rule a model passes if the"
        f" share stays below {SHARE:g} in all of these readings: {words}. Where the baseline passes too, the test"
        f" cannot tell a flow from ordinary layers. {_against(record)}",
    )


def _against(record: Record) -> str:
    factor = record["protocol"]["refinements"][0]
    hybrid, baseline = (
        by_seed(record, s, lambda r: r["refined"]["refined"][0]["share"]) for s in ("hybrid", "baseline")
    )
    test = paired_test(hybrid, baseline)
    return (
        f"Share at 1/{factor}, hybrid minus baseline: {paired(hybrid, baseline)} (p = {number(test.p)}, d_z ="
        f" {number(test.effect)})."
    )


def _section(title: str, head: list[str], rows: list[list[str]], text: str) -> str:
    return "\n".join([f"## {title}", "", text, "", *markdown_table(head, rows)])


def _small(i: Interval) -> str:
    """Three significant digits: norms and divergences cover orders of magnitude."""
    return f"{i.mean:.3g} ± {i.half:.2g}"


def _n(record: Record) -> int:
    return len(record["protocol"]["seeds"])
