"""Progress output of a program: phases, one progress bar, validation lines."""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TextIO

from tqdm import tqdm

_LINE_EVERY = 10.0  # seconds between progress lines where there is no terminal
_STILL_EVERY = 30.0  # seconds between signs of life of a silent phase where there is no terminal


class Console(Protocol):
    """What a program gives to what works for it: a stream for people, and `log_to(path)`, which says where the output
    of libraries goes from now on."""

    terminal: TextIO

    def log_to(self, path: Path) -> None: ...


class Progress:
    """Writes progress to a stream: a bar that redraws itself on a terminal, plain lines everywhere else."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._bar: tqdm | None = None
        self._total = self._first = self._done = 0
        self._began = self._last_line = 0.0
        self._rate: float | None = None
        self._text = ""

    def say(self, text: str) -> None:
        """One line of its own, above the bar."""
        if self._bar is not None:
            self._bar.clear()
        self._stream.write(text + "\n")
        self._stream.flush()
        if self._bar is not None:
            self._bar.refresh()

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Names what is happening while nothing else can be shown; a clock runs, so that it looks alive."""
        began, finished = time.monotonic(), threading.Event()

        def seconds() -> int:
            return round(time.monotonic() - began)

        def tick() -> None:
            while not finished.wait(1.0 if self._is_terminal else _STILL_EVERY):
                if self._is_terminal:
                    self._stream.write(f"\r{text} ... {seconds()} s\x1b[K")
                    self._stream.flush()
                else:
                    self.say(f"{text} ... {seconds()} s")

        self._stream.write(f"{text} ..." + ("" if self._is_terminal else "\n"))
        self._stream.flush()
        clock = threading.Thread(target=tick, daemon=True)
        clock.start()
        try:
            yield
        finally:
            finished.set()
            clock.join()
            if self._is_terminal:
                self._stream.write(f"\r{text} ... {seconds()} s\x1b[K\n")
                self._stream.flush()

    @contextlib.contextmanager
    def count(self, text: str) -> Iterator[Callable[[int, int], None]]:
        """A bar for work in equal parts: yields `tick(done, total)`, to be called after each part."""
        bar = _Bar(disable=not self._is_terminal, file=self._stream, desc=text, ncols=self._columns(), nrows=20)
        if not self._is_terminal:
            self.say(f"{text} ...")
        last = time.monotonic()

        def tick(done: int, total: int) -> None:
            nonlocal last
            bar.total = total
            bar.update(done - bar.n)
            if not self._is_terminal and time.monotonic() - last >= _LINE_EVERY:
                last = time.monotonic()
                self.say(f"{text} ... {done}/{total}")

        try:
            yield tick
        finally:
            bar.close()

    def start(self, done: int, total: int) -> None:
        """The bar begins: `done` of `total` steps are made already."""
        self._first = self._done = done
        self._total = total
        self._began = time.monotonic()
        self._last_line = 0.0
        if self._is_terminal:
            self._bar = _Bar(
                total=total,
                initial=done,
                file=self._stream,
                bar_format="{percentage:3.0f}%|{bar}| {desc}",
                ncols=self._columns(),
                nrows=20,  # tqdm hides its bar where a terminal does not tell its size, which some do not
            )

    def step(self, done: int, loss: float, tokens_per_second: float | None) -> None:
        """`done` steps are made; `loss` and `tokens_per_second` (None: unknown) are of the last of them."""
        made, self._done = done - self._done, done
        if tokens_per_second is not None:
            # A running mean over about ten steps; the first measurement stands for itself.
            before = tokens_per_second if self._rate is None else self._rate
            self._rate = 0.9 * before + 0.1 * tokens_per_second
        rate = "" if self._rate is None else f"  {self._rate:,.0f} tokens/s"
        self._text = f"step {done}/{self._total}  loss {loss:.3f}{rate}  {self._time_left()} left"
        if self._bar is not None:
            self._bar.ncols = self._columns()
            self._bar.set_description_str(self._text, refresh=False)
            self._bar.update(made)
        elif time.monotonic() - self._last_line >= _LINE_EVERY or done >= self._total:
            self._last_line = time.monotonic()
            self.say(self._text)

    def busy(self, text: str) -> None:
        """Says on the bar why it stands still."""
        if self._bar is not None:
            self._bar.set_description_str(f"{self._text}  ({text})")

    def validation(self, step: int, loss: float, unigram: float | None) -> None:
        """`step 200  validation loss 1.234  perplexity 3.44  (unigram 3.01)`; losses in nats per token."""
        if self._bar is not None:
            self._bar.set_description_str(self._text, refresh=False)  # no longer busy
        self.say(f"step {step}  {describe_loss(loss, unigram)}")

    def close(self) -> None:
        """Ends the bar and leaves the cursor on a line of its own."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:  # not a real terminal
            return 80

    def _time_left(self) -> str:
        made = self._done - self._first
        if made < 2:
            return "?"
        # Validation and checkpoints are part of the elapsed time, and so of the estimate.
        left = (time.monotonic() - self._began) / made * (self._total - self._done)
        return tqdm.format_interval(round(left))


def describe_loss(loss: float, unigram: float | None, digits: int = 3) -> str:
    """A validation loss (nats per token) in words, with the unigram entropy as the mark to beat."""
    text = f"validation loss {loss:.{digits}f}  perplexity {perplexity(loss):,.2f}"
    return text if unigram is None else f"{text}  (unigram {unigram:.2f})"


def perplexity(loss: float) -> float:
    """exp(loss), a large number instead of an overflow."""
    return math.exp(min(loss, 700.0))  # 700: about the largest power that a float holds


class _Bar(tqdm):
    monitor_interval = 0  # no watcher thread: it would only be one more thing to stop at exit
