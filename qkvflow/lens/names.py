"""Names of activations: `3.attn.pattern` (step, name), `3.1.attn.pattern` (with a stage), `state.0.5` (layer-time)."""

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from qkvflow.errors import UserError, shortened

_STATE = re.compile(r"(?P<part>.*\.)?state\.(?P<time>\d*\.?\d+|\d+\.)(/(?P<of>0*[1-9]\d*))?")
_CLOSE = 1e-3  # layer-times closer than this are equal
_STEP = re.compile(r"^((?:prelude\.|coda\.)?)(\d+)\.")


def state_name(step: int, steps: int) -> str:
    """The name of the state after `step` of `steps` steps: `state.0`, `state.0.25`, ..., `state.1`."""
    return f"state.{step / steps:.4g}"


def chosen(patterns: str | Iterable[str], known: Sequence[str]) -> frozenset[str]:
    """The names that match one of the patterns: globs (`*.attn.pattern`, `[0-2].mlp.*`), or names.

    Raises:
        UserError: a pattern that no name matches; the message lists the names.
    """
    patterns = [patterns] if isinstance(patterns, str) or not isinstance(patterns, Iterable) else list(patterns)
    return frozenset(name for pattern in patterns for name in _matches(pattern, known))


def _matches(pattern: str, known: Sequence[str]) -> list[str]:
    if not isinstance(pattern, str):
        raise UserError(f"a name must be a text such as '3.mlp.out', got {pattern!r:.80}.")
    found = [name for name in known if name == pattern or fnmatchcase(name, pattern)]
    found = found or _at_time(pattern, known)
    if not found:
        near = difflib.get_close_matches(pattern, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"this model has no activation {shortened(pattern)!r}.{hint} It has {summary(known)}.")
    return found


def _at_time(pattern: str, known: Sequence[str]) -> list[str]:
    """The state at the layer-time of a name in different notation (0.50, 1/3): the nearest one, if there is one."""
    wanted = _STATE.fullmatch(pattern)
    if wanted is None:
        return []
    matches = [(name, match) for name in known if (match := _STATE.fullmatch(name)) and match["part"] == wanted["part"]]
    away = {name: abs(_time(match) - _time(wanted)) for name, match in matches}
    nearest = min(away, key=away.__getitem__, default=None)
    return [] if nearest is None or away[nearest] >= _CLOSE else [nearest]


def _time(match: re.Match) -> float:
    return float(match["time"]) / float(match["of"] or 1)


def summary(known: Sequence[str]) -> str:
    """All names in one sentence: places inside steps once, with the range of steps."""
    steps: dict[str, list[int]] = {}
    rest = []
    for name in known:
        match = _STEP.match(name)
        if match:
            steps.setdefault(f"{match[1]}K.{name[match.end() :]}", []).append(int(match[2]))
        else:
            rest.append(name)
    by_range: dict[tuple[int, str], list[str]] = {}
    for name, numbers in steps.items():
        by_range.setdefault((max(numbers), name.partition("K.")[0]), []).append(name)
    told = [f"{', '.join(names)} for K = 0..{last}" for (last, _), names in by_range.items()]
    return "; ".join([", ".join(rest), *told])
