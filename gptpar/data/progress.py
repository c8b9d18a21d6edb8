"""Prints the progress of reading a corpus: how far, how fast, and the time left."""

from __future__ import annotations

import sys
import time
from typing import TextIO

TERMINAL_SECONDS = 0.2
LOG_SECONDS = 5.0


class CorpusProgress:
    """Counts documents and tokens; redraws its line on a terminal, else prints a line every few seconds.

    Args:
        total: bytes of all inputs on disk.
        log_interval: without a terminal, the number of documents after which to print a line instead.
        stream: where the lines go, stderr by default.
    """

    def __init__(self, total: int, log_interval: int | None = None, stream: TextIO | None = None):
        self.documents = self.tokens = self.text_bytes = 0
        self._total = total
        self._consumed = 0
        self._log_interval = log_interval
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._start = self._shown = time.monotonic()
        self._shown_documents = 0

    def update(self, consumed: int, documents: int, tokens: int, text_bytes: int) -> None:
        """Add to the counts; `consumed` is the position in the inputs, in bytes on disk."""
        self._consumed = consumed
        self.documents += documents
        self.tokens += tokens
        self.text_bytes += text_bytes
        if self._due():
            self._show()

    def finish(self) -> None:
        """Show the final progress, and end the terminal's line."""
        if self._terminal:
            self._show()
            print(file=self._stream, flush=True)

    def rates(self) -> str:
        """Documents, megabytes of text and tokens per second since the start."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        return (
            f"{self.documents / seconds:,.0f} docs/s, {self.text_bytes / 1e6 / seconds:.2f} MB/s, "
            f"{self.tokens / seconds:,.0f} tokens/s"
        )

    def seconds(self) -> float:
        return time.monotonic() - self._start

    def _due(self) -> bool:
        if self._log_interval is not None and not self._terminal:
            return self.documents - self._shown_documents >= self._log_interval
        return time.monotonic() - self._shown >= (TERMINAL_SECONDS if self._terminal else LOG_SECONDS)

    def _show(self) -> None:
        self._shown, self._shown_documents = time.monotonic(), self.documents
        done = min(self._consumed / self._total, 1.0) if self._total else 1.0
        left = self.seconds() * (1 - done) / done if done else 0.0
        line = f"{done:6.1%}  {self.documents:,} documents, {self.rates()}, {_clock(left)} left"
        print(
            f"\r{line}\x1b[K" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=self._stream,
            flush=True,
        )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
