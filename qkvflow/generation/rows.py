"""Maps slots to rows: a batch has as many rows as its texts need, so that few texts cost little.

Sizes are 2, 4, 8, ... and the number of slots: each is a compiled step. Never 1 if there are more slots: a product with
one row uses another kernel, whose results differ in the last bits, and a text must not depend on the rest of the batch.
XLA does not guarantee this for 2 or more rows: docs/generate.md says where it was measured.
"""

PATIENCE = 16  # steps for which a smaller batch must have sufficed before it shrinks


class Rows:
    """The rows of a batch for up to `slots` texts.

    elastic: the number of rows follows the number of texts; otherwise there are always `slots`.
    """

    def __init__(self, slots: int, elastic: bool):
        self.sizes = [2**k for k in range(1, slots.bit_length()) if 2**k < slots] if elastic else []
        self.sizes.append(slots)
        self.size = self.sizes[0]
        self._slots: list[int | None] = [None] * self.size
        self._idle = 0

    def row(self, slot: int) -> int | None:
        """The row of a slot's text."""
        return self._slots.index(slot) if slot in self._slots else None

    @property
    def occupied(self) -> list[tuple[int, int]]:
        """(slot, row) of all texts."""
        return [(slot, row) for row, slot in enumerate(self._slots) if slot is not None]

    def place(self, slot: int) -> tuple[int, list[int] | None]:
        """A row for a slot: its own if it has one. Also the rows to pick if the batch must grow first."""
        row, picks = self.row(slot), None
        if row is None and None not in self._slots:
            picks = self._resize(next(size for size in self.sizes if size > self.size))
        if row is None:
            row = self._slots.index(None)
            self._slots[row] = slot
        return row, picks

    def free(self, slot: int) -> int | None:
        """Frees the row of this slot and returns it."""
        row = self.row(slot)
        if row is not None:
            self._slots[row] = None
        return row

    def after_step(self) -> list[int] | None:
        """The rows to pick if the batch should shrink."""
        smaller = self.sizes[max(0, self.sizes.index(self.size) - 1)]
        self._idle = self._idle + 1 if len(self.occupied) <= smaller < self.size else 0
        return self._resize(smaller) if self._idle > PATIENCE else None

    def _resize(self, size: int) -> list[int]:
        kept = [row for _, row in self.occupied]
        picks = [*kept, *[-1] * (size - len(kept))]
        self._slots = [self._slots[row] if row >= 0 else None for row in picks]
        self.size, self._idle = size, 0
        return picks
