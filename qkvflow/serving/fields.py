"""Fields of a request: each is supported, accepted because it has no effect, or rejected by name; none is ignored.

A null field counts as absent, whatever its name: clients send all fields that they know.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qkvflow.generation.sampling import MAX_BIASES
from qkvflow.serving.errors import RequestError, wrong

MAX_STOPS = 16
_HUGE = 10**18
Check = Callable[[str, Any], Any]  # (name, value) -> what it means; raises `RequestError`


@dataclass(frozen=True)
class Fields:
    """The fields of a kind of request.

    Attributes:
        served: fields that the server implements, with the check of each.
        idle: fields known to clients; accepted with these values, which have no effect.
        harmless: accepted with any value, because they do not affect the generated text.
    """

    served: Mapping[str, Check]
    idle: Mapping[str, Sequence[Any]]
    harmless: frozenset[str]

    def read(self, raw: Any, example: str) -> dict[str, Any]:
        """The values of the given fields, checked.

        Raises:
            RequestError: names the first invalid field.
        """
        if not isinstance(raw, dict):
            raise RequestError(400, f"The body must be a JSON object such as {example}.")
        values = {}
        for name, value in raw.items():
            if value is None or name in self.harmless:
                continue
            if name in self.served:
                values[name] = self.served[name](name, value)
            elif name not in self.idle:
                known = ", ".join(self.served)
                raise wrong(name, f"Unrecognized request argument `{name:.80}`. Supported: {known}.")
            elif not any(_same(value, nothing) for nothing in self.idle[name]):
                raise wrong(name, f"`{name}` is not supported by this server: leave it out.")
        return values


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(name, f"`{name}` must be a text.")
    return value


def truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, f"`{name}` must be true or false.")
    return value


def integer(low: int | None = None, high: int | None = None) -> Check:
    """An integer within bounds; without `high`, of at most 18 digits where there is a `low`."""

    def check(name: str, value: Any) -> int:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        is_huge = is_integer and low is not None and value >= _HUGE
        if not is_integer or (low is not None and value < low) or (high is not None and value > high) or is_huge:
            raise wrong(name, f"`{name}` must be a whole number{_between(low, high)}, got {_show(value)}.")
        return value

    return check


def number(low: float, high: float = math.inf, *, above: bool = False) -> Check:
    """A finite number within bounds.

    Args:
        above: it must be strictly larger than `low`.
    """

    def check(name: str, value: Any) -> float:
        try:
            found = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        except OverflowError:
            found = math.inf
        if not math.isfinite(found) or not low <= found <= high or (above and found == low):
            limits = f" above {low:g}" if above else ""
            limits += _between(None if above else low, None if high == math.inf else high)
            raise wrong(name, f"`{name}` must be a number{limits}, got {_show(value)}.")
        return found

    return check


def top_k(name: str, value: Any) -> int | None:
    """-1 and 0 mean no limit, as in other servers."""
    found = integer(-1)(name, value)
    return found if found > 0 else None


def stops(name: str, value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or len(found) > MAX_STOPS or not all(isinstance(s, str) and s for s in found):
        raise wrong(name, f"`{name}` must be a nonempty text, or a list of at most {MAX_STOPS} nonempty texts.")
    return found


def biases(name: str, value: Any) -> dict[int, float]:
    """Tokens, given as strings, and their logit biases."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise wrong(name, f'`{name}` must be an object such as {{"50256": -100}}, of at most {MAX_BIASES} tokens.')
    found = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise wrong(name, f"`{name}`: a token is a whole number in quotes, got {token!r:.40}.")
        try:
            found[int(token)] = number(-100, 100)(name, bias)
        except RequestError as error:
            raise wrong(name, f"{error} This is the bias of token {token}.") from None
    return found


def stream_options(name: str, value: Any) -> dict[str, Any]:
    """Its options by name."""
    if not isinstance(value, dict):
        raise wrong(name, f'`{name}` must be an object such as {{"include_usage": true}}.')
    for key, given in value.items():
        inner = f"{name}.{key:.40}"
        if key == "include_usage" and given is not None:
            truth(inner, given)
        elif given is not None and not (key == "include_obfuscation" and given is False):
            raise wrong(inner, f"`{inner}` is not supported by this server: leave it out.")
    return value


def anything(name: str, value: Any) -> Any:
    """Checked elsewhere."""
    return value


def _same(value: Any, nothing: Any) -> bool:
    is_number = isinstance(value, int | float) and isinstance(nothing, int | float)
    return value == nothing and (type(value) is type(nothing) or (is_number and not isinstance(value, bool)))


def _between(low, high) -> str:
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    return f" of at least {low:g}" if low is not None else "" if high is None else f" of at most {high:g}"


def _show(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:  # an integer with thousands of digits
        shown = "a number with thousands of digits"
    return shown if len(shown) <= 40 else f"{shown[:40]}..."
