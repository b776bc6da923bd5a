"""Numbers for people: a few digits and a unit."""

from collections.abc import Sequence

BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
DECIMAL = ("B", "KB", "MB", "GB", "TB")


def scaled(value: float, step: int, units: Sequence[str], digits: int = 4) -> str:
    """`value` in the first of `units`, each `step` times the one before it, in which it is below `step`."""
    power = 0
    while value >= step and power + 1 < len(units):
        value, power = value / step, power + 1
    return f"{value:.{digits}g} {units[power]}".rstrip()


def in_bytes(count: float) -> str:
    """Four digits and a binary unit."""
    return scaled(count, 1024, BINARY)
