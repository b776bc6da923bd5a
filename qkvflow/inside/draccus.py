"""draccus internals: the registered choices of a class."""

from collections.abc import Mapping


def registered(cls: type) -> Mapping[str, type]:
    """Name -> class of the choices of a class and its siblings; empty for a class that is not a choice.

    Reason: draccus's `get_known_choices` first imports every module in which choices could be registered: for
    Levanter's models that takes seconds and prints warnings about missing libraries.
    """
    return getattr(cls, "_choice_registry", {})


def replace_choice(old: type, new: type) -> None:
    """Replaces a registered choice with another class, a subclass with further keys.

    Reason: draccus refuses to register a name twice.
    """
    registry = old._choice_registry
    name = next(name for name, choice in registry.items() if choice is old)
    registry[name] = new
