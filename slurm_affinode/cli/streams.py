"""Standard output and standard error: open whatever the caller left, and no fault where nobody reads them."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Stream(io.FileIO):
    """A standard stream. Where its reader has gone (``| head``), what is written goes nowhere and the work goes on.

    What was begun is finished, and the exit status says how it went; not that somebody had read enough.
    """

    gone = False

    def write(self, data: ReadableBuffer, /) -> int:
        """As of a file; errors that cannot be printed are lost. Raises ``OSError`` where standard output is full, but
        once: what is still buffered must not fail again at the end."""
        try:
            return super().write(data) or 0
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            self.gone = isinstance(error, BrokenPipeError)
            if self.fileno() == 1 and not self.gone:
                error.filename = "standard output"
                raise
            return memoryview(data).nbytes


def open_standard_streams() -> None:
    """Make the standard streams such that nothing which is printed is a fault or gets into another file.

    Where the caller has closed one (``>&-``) it is /dev/null: else the next file that is opened gets that number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - as long as the program
        elif stream is getattr(sys, f"__{name}__"):  # and not what a test captures
            setattr(sys, name, _careful(stream, number))


def _careful(stream: TextIO, number: int) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_Stream(number, "wb", closefd=False)),
        encoding=stream.encoding, errors=stream.errors, line_buffering=number == 2 or stream.isatty(),
    )  # fmt: skip


def reader_gone() -> bool:
    """Whether standard output was a pipe that nobody reads any more."""
    return getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "gone", False)
