"""Two texts that ship with Python, split into train and validation: its help, and the source of its library."""

import functools
import hashlib
import itertools
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from qkvflow.errors import UserError

_VALIDATION_FRACTION = 0.1
_SHINGLE_WORDS = 8
# Texts that share more than this fraction of the smaller text's word sequences stay in the same split.
_SHARED_FRACTION = 0.05
_NOT_LIBRARY = {"test", "tests", "idle_test", "pydoc_data"}  # tests, and the text of `topics`


@functools.cache
def topics() -> dict[str, str]:
    """Name and text of each topic, ordered by name (about 465 kB in total)."""
    from pydoc_data.topics import topics as by_name

    return dict(sorted(by_name.items()))


@functools.cache
def standard_library() -> dict[str, str]:
    """Path and text of each module of the standard library except tests (about 11 MB in total), ordered by path.

    Raises:
        UserError: this Python installation has no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, folders, files in os.walk(root):
        # Not every name is a module's: site-packages, which may be large, or config-3.11-x86_64-linux-gnu.
        folders[:] = [name for name in folders if name.isidentifier() and name not in _NOT_LIBRARY]
        paths += [Path(folder, name) for name in files if name.endswith(".py") and name[:-3].isidentifier()]
    found = {
        "/".join(path.relative_to(root).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(paths)
        if path.stem not in _NOT_LIBRARY and "_sysconfigdata" not in path.stem
    }
    if len(found) < 100:
        raise UserError(
            f"this Python has no source of its standard library in {root}: give other text, such as --data.train my.txt"
        )
    return found


BUILTIN_TEXTS: dict[str, Callable[[], dict[str, str]]] = {"topics": topics, "library": standard_library}


def documents_of(text: str, split: str) -> Iterator[str]:
    """The documents of one of BUILTIN_TEXTS in the split `train` or `validation`, in a fixed order that mixes
    subjects."""
    by_name, held_out = BUILTIN_TEXTS[text](), validation_names(text)
    for name in sorted(by_name, key=_name_hash):
        if (name in held_out) == (split == "validation"):
            yield by_name[name]


@functools.cache
def validation_names(text: str) -> frozenset[str]:
    """The held-out documents: about a tenth of the text, as whole groups of related documents.

    Many topics repeat sections of others verbatim ("customization" is a part of "specialnames", "try" of "compound"),
    and so do modules. A split by single documents would leak most of the validation text into training. Therefore
    documents that share text form a group, and groups are drawn in the order of a hash of their names, skipping those
    too large for the remaining space.
    """
    by_name = BUILTIN_TEXTS[text]()
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
    """Groups of documents; documents from different groups share almost no sequences of eight words."""
    shingles = {name: _shingles(text) for name, text in by_name.items()}
    first_with: dict[tuple[str, ...], str] = {}
    names_with: dict[tuple[str, ...], list[str]] = {}  # of those in several documents
    for name, own in shingles.items():
        for shingle in own:
            other = first_with.setdefault(shingle, name)
            if other is not name:
                names_with.setdefault(shingle, [other]).append(name)
    shared = Counter(pair for names in names_with.values() for pair in itertools.combinations(names, 2))
    group_of = {name: {name} for name in by_name}
    for (first, second), count in shared.items():
        smaller = min(len(shingles[first]), len(shingles[second]))
        if count > _SHARED_FRACTION * smaller and group_of[first] is not group_of[second]:
            merged = group_of[first] | group_of[second]
            group_of.update(dict.fromkeys(merged, merged))
    return list({id(group): group for group in group_of.values()}.values())


def _shingles(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + _SHINGLE_WORDS]) for i in range(max(len(words) - _SHINGLE_WORDS + 1, 1))}


def _name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
