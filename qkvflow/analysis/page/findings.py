"""One sentence with the conclusion from each panel, compared with shuffled text and untrained models.

Each function takes the page's own data and returns text. If the null case gives the same result, the sentence says so.
"""

import math
from collections.abc import Sequence
from statistics import median

import numpy as np

from qkvflow.analysis.page.numbers import Data

NAMES = {"qk": "QK", "ov": "OV", "ff": "FF"}
_MEASURES = {"radius": "spectral radius", "positive": "share of positive real parts", "symmetric": "symmetric share"}
_MARGIN = 0.05  # nats; smaller differences in loss are reported as equal
_RARE = 0.05  # the probability below which a rank among shuffled texts is an effect
_OFTEN = 0.1  # fraction of layer-times; quantities outside the untrained range less often are not reported


def of_training(curves: Data, uniform: float) -> str:
    """Training curves; null: the uniform distribution over tokens."""
    last = last_loss(curves)
    if last is None:
        return "There are no losses."
    kind = "Validation" if curves["eval"] else "Training"
    if last > uniform - _MARGIN:
        return (
            f"{kind} loss ends at {last:.3f} nats, no better than a uniform guess ({uniform:.2f}): nothing was learned."
        )
    best = min(curves["eval"], key=lambda pair: pair[1]) if curves["eval"] else None
    later = (
        "" if best is None or best[1] > last - _MARGIN else f"; it was lower before, {best[1]:.3f} at step {best[0]:g}"
    )
    return f"{kind} loss ends at {last:.3f} nats per token{later}; a uniform guess gives {uniform:.2f}."


def last_loss(curves: Data) -> float | None:
    """The last validation loss, or the last training loss if there is no validation loss."""
    return next((curves[kind][-1][1] for kind in ("eval", "train") if curves[kind]), None)


def of_spectra(family: str, own: Data, band: Data | None, times: Sequence[float]) -> str:
    """Eigenvalues of one family; null: untrained models with the same configuration."""
    middle = {name: [_middle(row) for row in own[name]] for name in _MEASURES}
    text = f"{NAMES[family]}: the spectral radius (median over heads) {_course(middle['radius'], times)}"
    positive = f"{middle['positive'][-1]:.0%} of the real parts are positive at the end"
    if band is None:
        return f"{text}; {positive}. Without untrained models (draws 0), this allows no conclusion."
    outside = {key: _outside(middle[key], *band[key]) for key in _MEASURES}
    left = [f"{_MEASURES[key]} ({_share(outside[key])} of the times)" for key in _MEASURES if outside[key] > _OFTEN]
    low, high = band["radius"][0][-1], band["radius"][1][-1]
    null = f"untrained models have {_short(low)} to {_short(high)} at the end"
    if not left:
        return f"{text}; {null}, and almost everything here is inside their range: it is not an effect of training."
    return f"{text}; {positive}; {null}. Outside the untrained range, so an effect of training: {', '.join(left)}."


def of_tokens(data: Data, labels: Sequence[str], shuffled: Sequence[Data]) -> str:
    """Sensitivity of the last token, by the median score; null: the tokens before it, shuffled.

    The positions of one text do not vary independently of each other: a text is one observation. Its rank among K
    shuffled texts has p = 2 / (K + 1) at both ends.
    """
    output = len(labels) - 1
    if not shuffled or output < 2:
        return "Without shuffled texts, one example allows no conclusion."
    last = _finite(data["scores"][-1][-1])
    best = sorted(range(output), key=lambda i: -last[i])[:3]
    own, others = median(last[:output]), [median(_finite(null["scores"])[:output]) for null in shuffled]
    top = ", ".join(f"“{_seen(labels[i])}” ({i})" for i in best)
    count, p = len(shuffled), 2 / (len(shuffled) + 1)
    text = f"Most sensitive to {top}. The median score is {_short(own)}; with the tokens before the last one shuffled"
    text += f" ({count} times), it is {_short(min(others))} to {_short(max(others))}"
    if min(others) <= own <= max(others):
        return f"{text}: no detectable effect of the order of the words."
    if p > _RARE:
        return f"{text}. That many shuffled texts allow no conclusion; `--shuffles {round(2 / _RARE) - 1}` would."
    return f"{text}: the order of the words has an effect (p = {p:.2g})."


def of_lens(data: Data, describe: Data, shuffled: Sequence[Data], fresh: Data | None) -> str:
    """Loss along t; nulls: shuffled text, an untrained model."""
    if len(describe["labels"]) < 2:
        return "A single token has no next token."
    loss = [float(np.mean(row)) for row in data["lens"]["loss"]]
    right = [sum(r == 0 for r in row) for row in data["lens"]["rank"]]
    total, ends = len(data["lens"]["rank"][0]), data["ends"]
    half = next((t for t, x in zip(ends, loss, strict=True) if x <= (loss[0] + loss[-1]) / 2), ends[-1])
    gained = loss[0] - loss[-1]
    text = f"{right[-1]} of {total} next tokens are correct at t = 1, {right[0]} at t = 0; "
    text += (
        f"half of the {gained:.2f} nats gained over depth is reached at t = {half:.2f}"
        if gained > _MARGIN
        else "depth gains nothing"
    )
    nulls = []
    if shuffled:
        other = float(np.mean([null["loss"][-1] for null in shuffled]))
        says = "so the model uses the order" if other > loss[-1] + _MARGIN else "so the model does not use the order"
        nulls.append(f"the shuffled text ends at {other:.2f} nats, this one at {loss[-1]:.2f}, {says}")
    if fresh is not None:
        nulls.append(f"an untrained model ends at {fresh['loss'][-1]:.2f}")
    return "; ".join([text, *nulls]) + "."


def echo(data: Data, describe: Data, tied: bool, around: tuple[int, int] = (0, 0)) -> str:
    """Explains the first row of the lens.

    Args:
        around: the numbers of layers before and after the flow.
    """
    ids, top = describe["ids"], data["lens"]["top"][0]
    same = sum(own == row[0] for own, row in zip(ids, top, strict=True))
    if any(around):
        return (
            f"At t = 0 the state has passed the {around[0]} layers before the flow, and is read through the {around[1]}"
            f" after it: {same} of {len(ids)} tokens are predicted to repeat."
        )
    if tied:
        return (
            f"At t = 0 the state is the token's own embedding and the head is the same matrix: {same} of {len(ids)}"
            " tokens are predicted to repeat, which is not a real prediction."
        )
    return (
        f"At t = 0 the state is the token's own embedding, which the head was not trained on: {same} of {len(ids)}"
        " tokens are predicted to repeat."
    )


def of_motion(data: Data, shuffled: Sequence[Data], fresh: Data | None) -> str:
    """Speed, turning and growth; nulls: shuffled text, an untrained model."""
    moved, turning = _middle(data["motion"]["displacement"][-1]), data["motion"]["turning"]
    text = f"The states move by {_short(moved)} times their initial length"
    if turning:
        angle = median([_middle(row) for row in turning])
        kind = (
            "nearly straight on"
            if angle > 0.7
            else "at right angles, as in a random walk"
            if abs(angle) < 0.3
            else "turning"
            if angle > 0
            else "turning back"
        )
        text += f" and move {kind} (median cosine of neighbouring velocities {angle:.2f})"
    nulls = []
    if shuffled:
        nulls.append(f"shuffled text {_short(median([n['motion']['displacement'][-1] for n in shuffled]))}")
    if fresh is not None:
        nulls.append(f"an untrained model {_short(fresh['motion']['displacement'][-1])}")
    first = data["exponents"][-1][0]
    grows = "amplified" if first > 0 else "damped"
    beside = [f"{n['exponents'][-1][0]:.2f} in shuffled text" for n in shuffled[:1]]
    beside += [] if fresh is None else [f"{fresh['exponents'][-1][0]:.2f} untrained"]
    return (
        f"{text}{'; ' + ', '.join(nulls) if nulls else ''}. The largest perturbation is {grows} by exp({first:.2f})"
        f"{' (' + ', '.join(beside) + ')' if beside else ''}."
    )


def of_attention(data: Data, uniform: Data, fresh: Data | None) -> str:
    """Where attention goes; nulls: uniform attention, an untrained model."""
    if not data.get("places"):
        return data.get("missing", "One token attends to itself.")
    names = {"first": "to the first token", "previous": "to the one before", "itself": "to itself"}
    mean = {key: float(np.mean(values)) for key, values in data["places"].items()}
    parts = [f"{mean[key]:.0%} {words} (even: {uniform[key]:.0%})" for key, words in names.items()]
    key = max(mean, key=lambda k: mean[k] / uniform[k])
    untrained = {} if fresh is None else fresh.get("places", {})
    null = f"; untrained, {float(np.mean(untrained[key])):.0%} go {names[key]}" if untrained else ""
    steps = data["places"][key]
    best = max(((n, h) for n, row in enumerate(steps) for h in range(len(row))), key=lambda p: steps[p[0]][p[1]])
    if mean[key] < 1.5 * uniform[key]:
        end = "on average, heads attend to none of these more than uniform attention does"
    else:
        end = (
            f"most above uniform: {names[key]}, in head {best[1]} of step {best[0] + 1} with"
            f" {steps[best[0]][best[1]]:.0%}"
        )
    return f"Attention goes {', '.join(parts)}{null}; {end}."


def of_depth(sweep: Sequence[Data], exits: Sequence[Data], anytime: Sequence[Data] = ()) -> str:
    """Other depths; null: the training depth (the lowest loss), and for speed plain decoding at that depth."""
    text = ""
    rows = [r for r in sweep if r["loss"] is not None]
    if rows:
        best, worst = min(rows, key=lambda r: r["loss"]), max(rows, key=lambda r: r["loss"])
        spans = worst["loss"] - best["loss"]
        near = [r["steps"] for r in rows if r["loss"] - best["loss"] < _MARGIN]
        far = [r["steps"] for r in rows if r["loss"] - best["loss"] >= _MARGIN]
        text = f"Evaluated in {len(rows)} ways, losses lie between {best['loss']:.3f} ({_way(best)}) and"
        text += f" {worst['loss']:.3f} ({_way(worst)}); "
        if spans < _MARGIN:
            text += "depth makes no difference."
        elif len(set(near)) > 1 and max(far) < min(near):
            text += f"from {min(near)} steps on, depth makes no difference."
        else:
            text += "the weights are specific to their training depth."
    saved = [r for r in exits if r["loss"] is not None and r["evaluations"] < r["of"]]
    full = [r for r in exits if r["loss"] is not None and r["evaluations"] >= r["of"]]
    if saved and full:
        r = saved[-1]
        text += f" Exits by {r['rule']} save {1 - r['evaluations'] / r['of']:.0%} of the evaluations"
        text += f" for {r['loss'] - full[0]['loss']:+.3f} nats."
    return f"{text} {_of_speed(anytime)}".strip()


def _of_speed(anytime: Sequence[Data]) -> str:
    """The fastest setting of each kind with almost no increase in loss."""
    known = [r for r in anytime[1:] if r["loss"] is not None]  # null: it is not finite
    full = anytime[0]["loss"] if anytime else None
    if full is None:
        return ""
    told = []
    for kind, words in (("steps", "at {} steps"), ("exit", "with exits by {}"), ("draft", "with drafts of {}")):
        good = [r for r in known if r["kind"] == kind and r["loss"] - full < _MARGIN]
        if good:
            best = max(good, key=lambda r: r["speed"])
            cost = "no loss" if kind == "draft" else f"{best['loss'] - full:+.3f} nats"
            told.append(f"{best['speed']:.2f} times {words.format(best['name'])} ({cost})")
    return f"Speed relative to plain decoding at full depth: {', '.join(told)}." if told else ""


def opening(runs: Sequence[Data]) -> list[str]:
    """The page's three opening sentences: the loss, where in depth it falls, how training changed the weights."""
    run, many = runs[0], len(runs) > 1
    newest = run["snapshots"][-1]
    losses = [(r["name"], last_loss(r["curves"])) for r in runs]
    told = ", ".join(f"{x:.3f} ({name})" for name, x in losses if x is not None)
    first = run["conclusions"]["training"]
    if many and told:
        first = f"The losses end at {told} nats per token; a uniform guess gives {run['uniform']:.2f}."
    family = "ov" if "ov" in newest["spectra"] else next(iter(newest["spectra"]))
    where = f"In {run['name']}, " if many else ""
    lens, weights = newest["texts"][0]["conclusions"]["lens"], newest["spectra"][family]["conclusion"]
    return [first, f"On the first text: {lens}" if not many else f"{where}on the first text: {lens}", where + weights]


def _outside(values, low, high) -> float:
    rows = [row for row in zip(values, low, high, strict=True) if None not in row and not math.isnan(row[0])]
    return sum(not a <= x <= b for x, a, b in rows) / len(values)


def _finite(scores: Sequence[float | None]) -> list[float]:
    """Scores of the page, where -inf (no influence at all) is null."""
    return [float("-inf") if x is None else x for x in scores]


def _share(share: float) -> str:
    return "all" if share == 1 else f"{share:.0%}"


def _course(values: Sequence[float], times: Sequence[float]) -> str:
    """How a number changes along t: first value, last value, and the maximum if it is neither."""
    if len(values) == 1:
        return f"is {_short(values[0])}"
    first, last = values[0], values[-1]
    scale = max(abs(first), abs(last), 1e-12)
    verb = "grows from" if last > first else "falls from"
    verb = "ends about where it starts, from" if abs(last - first) < 0.1 * scale else verb
    most = max(range(len(values)), key=lambda n: values[n])
    peak = f", with {_short(values[most])} at t = {times[most]:.2f} between" if values[most] > 1.2 * scale else ""
    return f"{verb} {_short(first)} at t = {times[0]:.2f} to {_short(last)} at t = {times[-1]:.2f}{peak}"


def _middle(row) -> float:
    """The median of the known values; nan without any, such as the symmetric shares of matrices of zeros."""
    known = [x for x in row if x is not None]
    return median(known) if known else float("nan")


def _short(x: float) -> str:
    return f"{x:.3g}"


def _way(reading: Data) -> str:
    return f"{reading['solver']}, {reading['steps']} steps"


def _seen(token: str) -> str:
    return token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
