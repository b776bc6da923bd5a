"""Keeps keys and values of only some evaluations of B, which the others share: `--cache latest | every N`.

    every N   of evaluations 0, N, 2N, ...; those between read the last kept ones, of the token itself too, so that the
              reading is a causal function of the text, however it is cut into windows (cross-layer attention: Brandon
              et al., arXiv 2405.12981)
    latest    one for each token, of its last evaluation; a token and those of its window (a prompt, read at once) see
              each other as they are (Geiping et al., arXiv 2502.05171, section 6.2)

`exact` keeps all. States of recurrences are small, and all are kept. Prelude and coda are exact.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
from haliax import NamedArray

from qkvflow.blocks import Inputs
from qkvflow.blocks.memory import Form, KeysValues, joined, parted
from qkvflow.depth import FixedPlan, integrate_with_memory
from qkvflow.errors import UserError


@dataclass(frozen=True)
class CacheSharing:
    """Which evaluations keep keys and values.

    Attributes:
        every: keep every N-th evaluation; 0 keeps only the last.
    """

    every: int = 1

    @staticmethod
    def of(text: "str | CacheSharing | None") -> "CacheSharing":
        """From `exact`, `latest` or `every N`.

        Raises:
            UserError: for any other text.
        """
        if text is None or isinstance(text, CacheSharing):
            return text or EXACT
        words = str(text).strip()
        found = re.fullmatch(r"every +([1-9][0-9]{0,5})", words)
        if found is None and words not in _NAMES:
            raise UserError(f"cache: {text!r:.80} is not known. Choices: exact, latest, every N (such as `every 2`).")
        return CacheSharing(int(found[1])) if found else _NAMES[words]

    def __str__(self) -> str:
        return {0: "latest", 1: "exact"}.get(self.every, f"every {self.every}")

    def check(self, *, with_exits: bool = False, with_drafts: bool = False) -> None:
        """Refuses combinations that no model has.

        Raises:
            UserError: exits with a cache that is not exact; drafts with `latest`.
        """
        if with_exits and self != EXACT:
            raise UserError(
                f"cache: {self} and exit cannot be combined: a stopped token stores its own keys and values in every"
                " later evaluation. Leave one of them out."
            )
        if with_drafts and self.every == 0:
            raise UserError(
                "cache: latest and draft_steps cannot be combined: with one set of keys and values per token, a pass"
                " over several drafts gives a different result than one token at a time. Use `every N`, or leave one"
                " out."
            )

    def kept(self, evaluations: int) -> int:
        """How many of so many evaluations keep keys and values."""
        return -(-evaluations // self.every) if self.every else 1


EXACT = CacheSharing(1)
_NAMES = {"exact": EXACT, "latest": CacheSharing(0)}


class SharedMemory(eqx.Module):
    """The memory of a flow whose evaluations share keys and values.

    Attributes:
        keys: of each evaluation that keeps some; states: of the recurrences of each evaluation.
        form: of the memory of one evaluation.
    """

    keys: tuple[tuple[KeysValues, ...], ...]
    states: tuple[tuple[NamedArray, ...], ...]
    form: Form = eqx.field(static=True)

    @staticmethod
    def of(evaluations: Sequence, sharing: CacheSharing) -> "SharedMemory":
        """From the empty memories of all evaluations."""
        parts = [parted(memory) for memory in evaluations]
        keys = tuple(keys for keys, _, _ in parts[: sharing.kept(len(parts))])
        return SharedMemory(keys, tuple(states for _, states, _ in parts), parts[0][2])


def integrate_with_shared_memory(
    blocks: Sequence, x: NamedArray, plan: FixedPlan, memory: SharedMemory, sharing: CacheSharing, inputs: Inputs
) -> tuple[NamedArray, SharedMemory]:
    """x(1) at the positions of `inputs.window`, and the memory with them."""
    keys, seen = list(memory.keys), 0  # evaluations so far: they come in order, and are traced one by one
    reads = dataclasses.replace(inputs, window=dataclasses.replace(inputs.window, written=True))

    def field(block, x: NamedArray, inputs: Inputs, states):
        nonlocal seen
        group, is_first = (seen // sharing.every, seen % sharing.every == 0) if sharing.every else (0, True)
        dx, after = block.extend(x, inputs if is_first else reads, joined(keys[group], states, memory.form))
        keys[group], states, _ = parted(after)
        seen += 1
        return dx, states

    x, states = integrate_with_memory(field, blocks, x, plan, memory.states, args=inputs)
    return x, SharedMemory(tuple(keys), states, memory.form)
