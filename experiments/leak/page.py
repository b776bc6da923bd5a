"""The page of the demonstration, from its JSON; the published numbers are constants, and in the JSON too."""

import math
from typing import Any

from experiments.leak import published
from experiments.results import made_by


def markdown(record: dict[str, Any]) -> str:
    """What the two models did, and the published statistics."""
    p, mask = record["protocol"], record["mask"]
    bound = math.log(p["vocab"])
    kind = "all true" if mask["is_all_true"] else "not all true"
    lines = [
        "# The leak of the time-indexed fork",
        "",
        f"- `causal_mask(Pos, Pos)`: axes {mask['axes']}, {kind}. With two names it is a triangle.",
        f"- Two models, alike but for that name: {p['steps']} steps of {p['batch']} x {p['position']} uniform random"
        f" tokens of {p['vocab']}, fresh in each step; seed {p['seed']}. The next token cannot be known, so no causal"
        f" model is below log({p['vocab']}) = {bound:.3f}.",
        f"- Loss in nats per token on {p['tested']} new sequences, ± 1.96 standard errors over them (n = 1 training).",
        f"- {made_by(record)}",
        "",
        "| axes of queries and keys | loss | a token is changed: the most that a logit before it moves |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {shown['loss']:.3f} ± {1.96 * shown['error']:.3f} | {shown['moved']:.3g} |"
            for name, shown in record["models"].items()
        ),
        "",
        "## The fork's five seeds (its losses come from models that see the future)",
        "",
        published.table(),
    ]
    return "\n".join(lines) + "\n"
