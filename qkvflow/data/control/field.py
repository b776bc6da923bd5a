"""The control of a record: its optional field `{"text": ..., "control": [0.1, 0, 0, 1]}`, read and checked."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from qkvflow.errors import UserError

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class ControlField:
    """
    Attributes:
        key: the key of the control in a record.
        dim: number of components of a control, equal to `model.control.dim`.
    """

    key: str
    dim: int

    def read(self, record: dict[str, Any], where: str) -> np.ndarray:
        """fp32 [dim]: the control of `record`; zero if the record has none (no such key, or null).

        Raises:
            UserError: the value is not a list of `dim` finite numbers; the message begins with `where` (file and line).
        """
        value = record.get(self.key)
        if value is None:
            return np.zeros(self.dim, dtype=np.float32)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(value, list | tuple):
            raise self._bad(where, f"{value!r:.60} of type {type(value).__name__}")
        if len(value) != self.dim:
            raise self._bad(where, f"a list of {len(value)}")
        for number in value:
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise self._bad(where, f"{number!r:.60}, which is not a number")
            if not abs(number) <= _LARGEST:  # also catches NaN
                raise self._bad(where, f"{number!r:.60}, which is not finite in single precision")
        return np.asarray(value, dtype=np.float32)

    def _bad(self, where: str, found: str) -> UserError:
        return UserError(
            f"{where}: the key {self.key!r} holds {found}; a control is a list of {self.dim} finite numbers, as"
            f" `model.control.dim` says. Fix the record, or leave out its {self.key!r} for zero control."
        )
