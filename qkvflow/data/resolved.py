"""Levanter's data configuration after resolving: the same, but its token caches are built safely."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from levanter.data.text import ConcatDatasetComponent, DatasetComponent, LmDataConfig
from levanter.store.cache import TreeCache

from qkvflow.data.cache import load_or_build


@dataclass(frozen=True)
class ResolvedDataConfig(LmDataConfig):
    """What `DataConfig.resolve` returns: an `LmDataConfig` whose caches are complete or absent.

    Each process of a run may call `build_caches`: a lock lets one build while the others wait.
    """

    def build_caches(self, split: str) -> dict[str, TreeCache[dict]]:
        caches: dict[str, TreeCache[dict]] = {}
        left_to_levanter = dict(self.components)
        for name, component in self.components.items():
            if split == "train" and not self._has_nonzero_weight(name):
                del left_to_levanter[name]
                continue
            own = [*_parts(name, component)]
            if not own:
                continue
            del left_to_levanter[name]
            for part_name, part in own:
                processor = part.format.build_preprocessor(self.the_tokenizer, enforce_eos=self.enforce_eos)
                cache = load_or_build(Path(part.cache_dir or ""), split, part.source, processor, self.cache_options)
                if cache is not None:
                    caches[part_name] = cache
        if left_to_levanter:
            rest = dataclasses.replace(self, components=left_to_levanter, train_weights=None)
            caches |= LmDataConfig.build_caches(rest, split)
        return caches


def _parts(name: str, component: object) -> Iterator[tuple[str, DatasetComponent]]:
    """The cache-backed parts of a component with source and local cache folder, all or none of them."""
    if isinstance(component, DatasetComponent):
        parts = [(name, component)]
    elif isinstance(component, ConcatDatasetComponent):
        parts = [(f"{name}/{child_name}", child) for child_name, child in component.children.items()]
    else:
        return
    # A component without a source, or with a cache on an object store, is Levanter's business.
    if all(
        part.source is not None and not part.flat_cache and part.cache_dir and "://" not in part.cache_dir
        for _, part in parts
    ):
        yield from parts
