"""Two texts that every Python carries, split into train and validation: the English of its help, and its own source."""

import functools
import hashlib
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from qkvflow.errors import UserError

_VALIDATION_FRACTION = 0.1
_SHINGLE_WORDS = 8
# Topics that share more than this part of the smaller one's word sequences are kept on one side of the split.
_SHARED_FRACTION = 0.05
_LIBRARY_BYTES = 1_000_000
_LIBRARY_VALIDATION_EVERY = 10


def topics() -> dict[str, str]:
    """Name and text of each topic, in the order of the names (about 465 kB in all)."""
    from pydoc_data.topics import topics as by_name

    return dict(sorted(by_name.items()))


def topics_of(split: str) -> Iterator[str]:
    """The topics of `pydoc` in the split `train` or `validation`, in a fixed order that mixes the subjects."""
    held_out = validation_names()
    by_name = topics()
    for name in sorted(by_name, key=_name_hash):
        if (name in held_out) == (split == "validation"):
            yield by_name[name]


@functools.lru_cache(maxsize=1)
def validation_names() -> frozenset[str]:
    """The topics held out: about a tenth of the text, whole groups of related topics.

    Many topics repeat sections of others word for word ("customization" is a part of "specialnames", "try" of
    "compound"): a split topic by topic would show the model most of its validation text. So topics that share
    text form a group, and groups are drawn in the order of a hash of their names, skipping those too big for
    what is still to be filled.
    """
    by_name = topics()
    wanted = _VALIDATION_FRACTION * sum(map(len, by_name.values()))
    held_out: set[str] = set()
    filled = 0
    for group in sorted(related_groups(by_name), key=lambda group: _name_hash(min(group))):
        size = sum(len(by_name[name]) for name in group)
        if filled + size <= wanted:
            held_out |= group
            filled += size
    return frozenset(held_out)


def related_groups(by_name: Mapping[str, str]) -> list[set[str]]:
    """The topics in groups such that topics of different groups share next to no sequences of eight words."""
    shingles = {name: _shingles(text) for name, text in by_name.items()}
    group_of = {name: {name} for name in by_name}
    names = list(by_name)
    for index, first in enumerate(names):
        for second in names[:index]:
            shared = len(shingles[first] & shingles[second])
            smaller = min(len(shingles[first]), len(shingles[second]))
            if shared > _SHARED_FRACTION * smaller and group_of[first] is not group_of[second]:
                merged = group_of[first] | group_of[second]
                group_of.update(dict.fromkeys(merged, merged))
    return list({id(group): group for group in group_of.values()}.values())


def modules_of(split: str) -> Iterator[str]:
    """Modules of the standard library, about 1 MB, in the split `train` or `validation`, the subjects mixed.

    Raises:
        UserError: this Python carries no sources.
    """
    for index, path in enumerate(_modules()):
        if (index % _LIBRARY_VALIDATION_EVERY == 0) == (split == "validation"):
            yield path.read_text(encoding="utf-8")


@functools.lru_cache(maxsize=1)
def _modules() -> tuple[Path, ...]:
    """Top-level modules in the order of a hash of their names, until there is enough text."""
    folder = Path(sysconfig.get_path("stdlib"))
    chosen, size = [], 0
    for path in sorted(folder.glob("*.py"), key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        if size >= _LIBRARY_BYTES:
            break
        chosen.append(path)
        size += path.stat().st_size
    if size < _LIBRARY_BYTES // 2:
        raise UserError(
            f"this Python carries no sources of its standard library in {folder}: give other text, such as"
            " --data.train my.txt"
        )
    return tuple(chosen)


def _shingles(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + _SHINGLE_WORDS]) for i in range(max(len(words) - _SHINGLE_WORDS + 1, 1))}


def _name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
