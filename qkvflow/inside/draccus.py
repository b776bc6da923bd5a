"""Of draccus: the choices of a class that are registered so far."""

from collections.abc import Mapping


def registered(cls: type) -> Mapping[str, type]:
    """Name -> class of the choices that a class and its siblings have; empty for a class that is no choice.

    Reason: draccus's `get_known_choices` first imports every module in which choices could be registered: for models of
    Levanter that takes seconds and prints warnings of libraries that are not there.
    """
    return getattr(cls, "_choice_registry", {})


def replace_choice(old: type, new: type) -> None:
    """Lets the name of a registered choice stand for another class, a subclass with further keys.

    Reason: draccus refuses to register a name twice.
    """
    registry = old._choice_registry
    name = next(name for name, choice in registry.items() if choice is old)
    registry[name] = new
