"""A batch has as many rows as its texts need, and a text keeps its row's content when the rows change."""

import random

from qkvflow.generation.rows import PATIENCE, Rows


def test_sizes():
    assert Rows(8, elastic=True).sizes == [2, 4, 8]
    assert Rows(6, elastic=True).sizes == [2, 4, 6]
    assert Rows(2, elastic=True).sizes == [2]
    assert Rows(1, elastic=True).sizes == [1]
    assert Rows(3, elastic=False).sizes == [3]


def test_few_texts_have_few_rows():
    rows = Rows(8, elastic=True)
    for slot, size in enumerate((2, 2, 4, 4, 8, 8, 8, 8)):
        _, picks = rows.place(slot)
        assert rows.size == size
        assert (picks is None) == (slot not in (2, 4))
    for slot in range(1, 8):
        rows.free(slot)
    steps = [rows.after_step() for _ in range(2 * PATIENCE + 2)]
    assert [len(picks) for picks in steps if picks] == [4, 2], "by halves, and not before it has lasted"


def test_rows_that_are_needed_again_stay():
    rows = Rows(4, elastic=True)
    for slot in range(3):
        rows.place(slot)
    for _ in range(5):
        rows.free(2)
        assert not any(rows.after_step() for _ in range(PATIENCE))
        assert rows.place(2)[1] is None
        assert rows.after_step() is None


def test_texts_keep_their_content():
    """The content of rows, moved as the engine moves it, follows the slots through any history."""
    draw = random.Random(0)
    rows, content, held = Rows(16, elastic=True), [None, None], {}
    for moment in range(3000):
        slot = draw.randrange(16)
        if draw.random() < (0.3 if moment // 300 % 2 else 0.7):
            row, picks = rows.place(slot)
            if picks is not None:
                content = [content[row] if row >= 0 else None for row in picks]
            content[row] = held[slot] = moment
        elif slot in held:
            content[rows.free(slot)] = None
            del held[slot]
        picks = rows.after_step()
        if picks is not None:
            content = [content[row] if row >= 0 else None for row in picks]
        assert len(content) == rows.size >= len(held)
        assert {slot: content[row] for slot, row in rows.occupied} == held
