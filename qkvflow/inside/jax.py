"""JAX internals: the thread that writes a checkpoint's arrays, and the messages between processes meanwhile."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

_FILES = ("value", "btree_node", "version_tree_node")


@dataclass(frozen=True)
class _Turn:
    """Work that JAX's thread does when it asks for the result of a write."""

    result: Callable[[], None]


class SharedManager(GlobalAsyncCheckpointManager):
    """JAX's manager, with hooks for a subclass to follow the progress of writes.

    Reason: JAX has a hook for work after all processes have written everything, but none while they write.
    """

    def while_writing(self) -> None:
        """Called repeatedly in the writing thread, once arrays are on disk."""

    def when_written(self) -> None:
        """Called in that thread when this process has written all its arrays."""

    def tell(self, key: str, text: str) -> None:
        """Sends a text to the other processes."""
        self._client.key_value_set(key, text)

    def hear(self, key: str) -> str:
        """Waits for the text that another process sends."""
        return self._client.blocking_key_value_get(key, self._timeout_in_ms)

    def _add_futures(self, futures: Iterable[Any]) -> None:
        # The thread asks for the results in turn; files appear long before the last result.
        turns = [turn for future in futures for turn in (future, _Turn(self.while_writing))]
        super()._add_futures([*turns, _Turn(self.when_written)])


def name_files(specs: Sequence[dict[str, Any]], prefix: str) -> None:
    """Makes the names of all array files for these TensorStore specs begin with `prefix`, which may contain folders.

    Reason: JAX writes the specs, and gives the files of all processes the same prefix.
    """
    for spec in specs:
        spec["kvstore"] |= {f"{kind}_data_prefix": prefix for kind in _FILES}
