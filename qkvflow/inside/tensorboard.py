"""tensorboardX internals: the calls of its writing thread."""

from collections.abc import Callable
from typing import Any


def on_os_errors(writer: Any, tell: Callable[[OSError], None]) -> None:
    """Makes a `SummaryWriter` report disk errors instead of raising them.

    Reason: it raises them in the thread that empties its queue, which then ends; the next metric waits for ever for
    room in the queue.
    """

    def telling(function: Callable) -> Callable:
        def call(*args: Any) -> Any:
            try:
                return function(*args)
            except OSError as error:
                return tell(error)

        return call

    events = writer.file_writer.event_writer._ev_writer
    for name in ("write_event", "flush", "close"):
        setattr(events, name, telling(getattr(events, name)))
