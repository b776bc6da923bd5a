"""The field `exit` of a request: when the tokens of its texts stop integrating.

    {"threshold": 0.1, "min_steps": 2}   these limits; the server's own where one is left out
    false                                none: the full depth

The rule is the server's, which its programs are compiled with, as is the least number of steps.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from qkvflow.generation import ExitConfig
from qkvflow.generation.prepare import PreparedModel
from qkvflow.serving import fields
from qkvflow.serving.errors import wrong
from qkvflow.serving.fields import Check

_KEYS: dict[str, Check] = {
    "rule": fields.text,
    "threshold": fields.number(0),
    "min_steps": fields.integer(1),
}


def limits(name: str, value: Any) -> dict[str, Any]:
    """The given keys, each checked by itself; `false` is a threshold of 0."""
    if value is False:
        return {"threshold": 0.0}
    if not isinstance(value, dict):
        raise wrong(name, f'`{name}` must be an object such as {{"threshold": 0.1, "min_steps": 1}}, or false.')
    unknown = next((key for key in value if key not in _KEYS), None)
    if unknown is not None:
        inner = f"{name}.{unknown:.40}"
        raise wrong(inner, f"`{inner}` is not known. Supported: {', '.join(_KEYS)}.")
    return {key: _KEYS[key](f"{name}.{key}", given) for key, given in value.items() if given is not None}


def config(name: str, asked: Mapping[str, Any] | None, prepared: PreparedModel) -> ExitConfig | None:
    """The exits of a text: what `limits` found, the rest as in the server's; None if nothing is asked.

    Raises:
        RequestError: this server cannot do that.
    """
    if asked is None:
        return None
    own = prepared.exits
    if own is None:
        raise wrong(name, f"This server has no exits (--exit), but `{name}` is given. Leave it out.")
    rule, least, most = asked.get("rule", own.rule), own.min_steps, prepared.steps - 1
    if rule != own.rule:
        message = f"This server's rule is {own.rule} (--exit), but `{name}.rule` is {rule!r:.40}."
        raise wrong(f"{name}.rule", f"{message} Leave it out, or use {own.rule}.")
    min_steps = asked.get("min_steps", least)
    if not least <= min_steps <= most:
        raise wrong(
            f"{name}.min_steps",
            f"`{name}.min_steps` must be a whole number from {least}, the server's own (--exit), to {most}, one below"
            f" the steps of the model; got {min_steps}.",
        )
    return dataclasses.replace(own, threshold=asked.get("threshold", own.threshold), min_steps=min_steps)
