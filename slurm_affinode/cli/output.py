"""Standard streams that are open even if the caller closed them, and do not fail if the reader has gone."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Stream(io.FileIO):
    """A standard stream that discards output once its reader has gone (``| head``).

    The command completes its work, and the exit status is that of the work.
    """

    has_no_reader = False

    def write(self, data: ReadableBuffer, /) -> int:
        """Write ``data``. If that fails, redirect the stream to /dev/null.

        Raises ``OSError`` if standard output cannot be written, for example on a full disk, but only once: the rest of
        the buffer must not fail again at exit. Broken pipes and errors of standard error are ignored.
        """
        try:
            return super().write(data) or 0
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            self.has_no_reader = isinstance(error, BrokenPipeError)
            if self.fileno() == 1 and not self.has_no_reader:
                error.filename = "standard output"
                raise
            return memoryview(data).nbytes


def open_standard_streams() -> None:
    """Reopen the standard streams so that output neither fails nor ends up in another file.

    A stream that the caller closed (``>&-``) becomes /dev/null: otherwise the next opened file would get its number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, that is, this one
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - as long as the program
        elif stream is getattr(sys, f"__{name}__"):  # not replaced by a test
            setattr(sys, name, _careful(stream, number))


def _careful(stream: TextIO, number: int) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_Stream(number, "wb", closefd=False)),
        encoding=stream.encoding, errors=stream.errors, line_buffering=number == 2 or stream.isatty(),
    )  # fmt: skip


def reader_gone() -> bool:
    """Return whether standard output is a pipe without a reader."""
    return getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "has_no_reader", False)
