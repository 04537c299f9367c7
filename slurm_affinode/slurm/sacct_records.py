"""The irregular lines of sacct text: which of them make a record together, and what cannot be one."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from slurm_affinode.slurm.accounting import Problem
from slurm_affinode.slurm.fields import FREE_TEXT, KNOWN
from slurm_affinode.slurm.sacct_header import Header
from slurm_affinode.slurm.sacct_repair import fits, repair

_OWN_STEPS = ("batch", "extern", "interactive")
_SHOWN = 60
_MOST_LINES = 12
"""Of one record whose text before the id goes over several lines."""


class SlowPath:
    """Puts irregular lines of one segment together to records.

    A group begins with a line that begins as a record does, with a job id where the job id stands; the irregular
    lines after it belong to it. Lines that begin as no record does are the rest of the last text of the regular line
    before them, where that can be, else no record.

    Where a text stands before the id, the line on which a record begins may not have the id. Then lines that follow one
    another are cut so that most of them belong to a record in which each cell has the form of its column.
    """

    def __init__(self, lines: pl.Series, header: Header, first_line: int) -> None:
        self._lines = lines
        self._header = header
        self._first = first_line
        self.total = len(lines)
        self.rows: list[list[str]] = []
        self.row_lines: list[int] = []
        self.problems: list[Problem] = []
        self.taken: set[int] = set()
        """Positions of regular lines that became part of a group."""
        self.continued: list[int] = []
        self.repaired = 0
        self.last_group = 0
        """Line at which the last group begins."""
        self.last_group_end = 0

    def run(self, irregular: list[int]) -> None:
        """Work through the positions ``irregular``, ascending."""
        if self._header.text_before_id:
            self._run_before_id(irregular)
            return
        odd = set(irregular)
        at = 0
        while at < len(irregular):
            start = irregular[at]
            group = [start]
            at += 1
            while (
                at < len(irregular) and irregular[at] == group[-1] + 1 and not self._begins(self._lines[group[-1] + 1])
            ):
                group.append(irregular[at])
                at += 1
            texts = [self._lines[i] for i in group]
            while texts and not texts[-1]:
                texts.pop()
            if not texts:
                continue
            self._group(start, texts, before=start - 1 if start > 0 and start - 1 not in odd else None)
            self.last_group_end = self._first + start + len(texts) - 1

    def _run_before_id(self, irregular: list[int]) -> None:
        for start, end in _neighbours(irregular):
            last = end + (end < self.total)  # a text may end on a line that looks regular
            texts = [self._lines[i] for i in range(start, last)]
            for low, high, cells in self._cuts(texts):
                if high > end - start and high - low == 1:
                    continue  # the regular line alone
                self.last_group, self.last_group_end = self._first + start + low, self._first + start + high - 1
                if cells is None:
                    if texts[low]:
                        self._problem(self._first + start + low, None, f"not a record: {self._count(texts[low])}")
                    continue
                if high > end - start:
                    self.taken.add(end)
                self._take(cells, texts[low:high], self._first + start + low)

    def _cuts(self, texts: list[str]) -> Iterator[tuple[int, int, list[str] | None]]:
        """The records in ``texts``: from which line to which, and the cells; ``None`` for a line that is of none.

        As few lines as can be are of none; then as many records as can be.
        """
        total = len(texts)
        best: list[tuple[int, int, int, list[str] | None]] = [(0, 0, total, None)] * (total + 1)
        for low in range(total - 1, -1, -1):
            without = best[low + 1]
            best[low] = (without[0] + bool(texts[low]), without[1], low + 1, None)
            for high in range(low + 1, min(low + _MOST_LINES, total) + 1):
                rest = best[high]
                if (rest[0], rest[1] - 1) < best[low][:2] and (cells := self._whole(texts[low:high])) is not None:
                    best[low] = (rest[0], rest[1] - 1, high, cells)
        low = 0
        while low < total:
            _, _, high, cells = best[low]
            yield low, high, cells
            low = high

    def _whole(self, texts: list[str]) -> list[str] | None:
        """The cells of one record, where ``texts`` are one."""
        header = self._header
        pieces = "\n".join(texts).split(header.delimiter)
        if not header.delimiters <= len(pieces) - 1 <= header.delimiters + _MOST_LINES:
            return None
        if len(pieces) - 1 > header.delimiters:
            return repair(pieces, header)
        cells = pieces[: len(header.names)]
        return cells if all(map(fits, header.names, cells)) else None

    def _group(self, start: int, texts: list[str], before: int | None) -> None:
        self.last_group = self._first + start
        if self._begins(texts[0]):
            self._record(texts, self._first + start)
        elif before is not None and self._goes_on(self._lines[before]):
            self.taken.add(before)
            self.last_group = self._first + before
            self._record([self._lines[before], *texts], self._first + before)
        else:
            for offset, text in enumerate(texts):
                if text:
                    self._problem(self._first + start + offset, None, f"not a record: {self._count(text)}")

    def _begins(self, text: str) -> bool:
        header = self._header
        if header.delimiter is None:
            return fits(header.names[0], text) and bool(text)
        pieces = text.split(header.delimiter)
        extra = len(pieces) - 1 - header.delimiters
        if extra > 0:
            # A text before the id may hold delimiters, which moves the id to the right.
            return any(fits("jobid", piece) for piece in pieces[header.id_column : header.id_column + extra + 1])
        if len(pieces) < min(header.id_column + 2, len(header.names)):
            return False
        return fits("jobid", pieces[header.id_column]) and all(
            fits(name, piece) for name, piece in zip(header.names, pieces[: header.id_column], strict=False)
        )

    def _goes_on(self, text: str) -> bool:
        """Whether the last cell of a regular line may go on in the next line: a text, and one that a person chose."""
        header = self._header
        if header.delimiter is None or header.names[-1] not in FREE_TEXT or header.trailing:
            return False
        cells = text.split(header.delimiter)
        step = cells[header.id_column].rpartition(".")[2]
        return bool(cells[-1]) and step not in _OWN_STEPS

    def _record(self, texts: list[str], line: int) -> None:
        header = self._header
        whole = "\n".join(texts)
        pieces = whole.split(header.delimiter) if header.delimiter is not None else [whole]
        job = self._job(pieces)
        if len(pieces) - 1 < header.delimiters:
            self._problem(line, job, f"{self._count(whole)}: cut, or of another file")
            return
        regular = len(pieces) - 1 == header.delimiters
        cells = pieces[: len(header.names)] if regular else repair(pieces, header)
        if cells is None:
            self._problem(line, job, f"{self._count(whole)}, and no one reading of them makes sense")
            return
        self._take(cells, texts, line)

    def _take(self, cells: list[str], texts: list[str], line: int) -> None:
        delimiter = self._header.delimiter
        self.repaired += delimiter is not None and sum(t.count(delimiter) for t in texts) > self._header.delimiters
        self.rows.append(cells)
        self.row_lines.append(line)
        if len(texts) > 1:
            self.continued.append(line)

    def _job(self, pieces: list[str]) -> str | None:
        at = self._header.id_column
        return pieces[at] if at < len(pieces) and fits("jobid", pieces[at]) else None

    def _count(self, text: str) -> str:
        delimiter = self._header.delimiter
        cells = text.count(delimiter) + 1 - self._header.trailing if delimiter is not None else 1
        return f"{max(cells, 1)} of {len(self._header.names)} fields"

    def _problem(self, line: int, job: str | None, reason: str) -> None:
        self.problems.append(Problem(line, job, None, reason))


def _neighbours(positions: list[int]) -> Iterator[tuple[int, int]]:
    """The runs of consecutive ``positions``, half-open."""
    start = None
    for position, following in zip(positions, [*positions[1:], None], strict=True):
        start = position if start is None else start
        if following != position + 1:
            yield start, position + 1
            start = None


def printed_name(name: str) -> str:
    """The name of a column as sacct writes it."""
    return KNOWN.get(name.partition("#")[0], name)


def shorten(text: str) -> str:
    """``text`` short enough for one line of a message."""
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")
