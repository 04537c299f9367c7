"""Splitting of sacct text into blocks of string columns, a few tens of MiB at a time.

Regular lines (the right number of delimiters) are split by Polars. The others take a slow path: records over several
lines (a newline in a name), delimiters in names, truncated lines, repeated headers. Text chosen by a user may contain
the delimiter; every other column has a fixed form, so most damaged lines have exactly one reading in which each cell
has the form of its column.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import BinaryIO, cast

import polars as pl

from slurm_affinode.base.columns import native
from slurm_affinode.base.columns.native import Kind
from slurm_affinode.base.errors import InputError
from slurm_affinode.base.input_files import count_byte, whole_lines
from slurm_affinode.base.limits import ACCOUNTING_LINE_BYTES, most_bytes
from slurm_affinode.slurm import identifiers
from slurm_affinode.slurm.accounting.sacct_header import FREE_TEXT, KNOWN, USED, Header, find_header, parse_header
from slurm_affinode.slurm.accounting.schema import Problem

_TIME = (
    r"(?:|Unknown|None|N/A|INVALID|0|\d{9,11}|\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)"
)
_SPAN = r"(?:|(?:\d+-)?\d+(?::\d+){0,2}(?:\.\d+)?|UNLIMITED|Partition_Limit|INVALID|Unknown)"
_NUMBER = r"(?:|\?|-?\d+(?:\.\d+)?[KMGTPE]?[nc?]?|Unknown|UNLIMITED|Partition_Limit|NOT_SET)"
# No name occurs twice: this separates two adjacent TRES columns if the delimiter is a comma.
_TRES = r"(?!(?:.*,)?([\w/.:@+-]+)=.*,\1=)(?:|[\w/.:@+-]+=[\w.]+(?:,[\w/.:@+-]+=[\w.]+)*)"
_NODES = r"(?:|None assigned|None|[\w.-]+(?:\[[\d,-]+\][\w.-]*)*(?:,[\w.-]+(?:\[[\d,-]+\][\w.-]*)*)*)"
_GRES = r"(?:|[\w/.:=()-]+(?:,[\w/.:=()-]+)*)"

_TIMES = ("submit", "eligible", "start", "end")
_SPANS = """elapsed suspended timelimit cputime totalcpu usercpu systemcpu avecpu mincpu planned reserved resvcpu"""
_NUMBERS = """elapsedraw timelimitraw cputimeraw plannedcpuraw resvcpuraw alloccpus ncpus nnodes allocnodes ntasks
reqcpus reqnodes reqmem maxrss averss maxvmsize avevmsize maxpages avepages consumedenergyraw consumedenergy priority
restarts uid gid dbindex associd qosraw wckeyid avediskread avediskwrite maxdiskread maxdiskwrite maxrsstask
avecpufreq"""

_FORMS: dict[str, str] = {
    **dict.fromkeys(("jobid", "jobidraw"), identifiers.PATTERN.strip("^$")),
    **dict.fromkeys(_TIMES, _TIME),
    **dict.fromkeys(_SPANS.split(), _SPAN),
    **dict.fromkeys(_NUMBERS.split(), _NUMBER),
    **dict.fromkeys(("alloctres", "reqtres"), _TRES),
    **dict.fromkeys(("allocgres", "reqgres"), _GRES),
    **dict.fromkeys(("exitcode", "derivedexitcode"), r"(?:|-?\d+:\d+)"),
    "state": r"(?:|[A-Z][A-Z_]*\+?|CANCELLED by [\w.@\\-]+\+?)",
    "nodelist": _NODES,
    "blockid": r"\d*",
    "layout": r"(?:|[A-Z][A-Za-z,_]*)",
    "cluster": r"[\w.-]*",
}
_WORD = r"[^\r\n]*"
_COMMAND = re.compile(r"^$|^(?:[\w./~-]*/)?(?:sbatch|srun|salloc|scrontab|sattach|swrap|slurmrestd)\b")
_MAX_READINGS = 64
_TRES_NUMBERS = {
    name: i for i, name in enumerate(("cpu", "mem", "energy", "node", "billing", "fs/disk", "vmem", "pages"))
}


@lru_cache(maxsize=512)
def _form(name: str) -> re.Pattern[str]:
    return re.compile(_FORMS.get(name.partition("#")[0], _WORD))


def fits(name: str, cell: str) -> bool:
    """Return whether ``cell`` has the form of the column ``name``; columns without a form accept any single line."""
    return name in FREE_TEXT or _form(name).fullmatch(cell) is not None


def repair(pieces: list[str], header: Header) -> list[str] | None:
    """Assign ``pieces``, the texts between the delimiters of one record, to the columns.

    ``None`` if no reading has every cell in the form of its column, or if several differ in columns that the figures
    need. TRES lists are extended as long as they are in Slurm's order. Readings that differ only in texts are ranked:
    first those with a SubmitLine that begins as a command line, then those with the extra text in the last column.
    """
    if header.trailing:
        if pieces[-1].strip():
            return None
        pieces = pieces[:-1]
    if len(pieces) < len(header.names):
        return None
    readings: list[list[str]] = []
    for cells in _readings(pieces, header):
        readings.append(cells)
        if len(readings) >= _MAX_READINGS:
            break
    if not readings:
        return None
    readings = _longest_lists(readings, header)
    fixed = [i for i, name in enumerate(header.names) if name in USED and name not in FREE_TEXT]
    if any([cells[i] for i in fixed] != [readings[0][i] for i in fixed] for cells in readings[1:]):
        return None
    if "submitline" in header.names:
        column = header.names.index("submitline")
        readings = [cells for cells in readings if _COMMAND.match(cells[column])] or readings
    return readings[0]


def _longest_lists(readings: list[list[str]], header: Header) -> list[list[str]]:
    """Return the readings with the most TRES lists in order, and of these the ones with the most resources."""
    lists = [i for i, name in enumerate(header.names) if name in ("alloctres", "reqtres")]

    def worth(cells: list[str]) -> tuple[int, int]:
        named = [[re.split("[:=]", part)[0] for part in cells[i].split(",")] for i in lists]
        return sum(map(_in_order, named)), sum(map(len, named))

    worths = [worth(cells) for cells in readings]
    return [cells for cells, value in zip(readings, worths, strict=True) if value == max(worths)]


def _in_order(names: list[str]) -> bool:
    """Return whether the names are in Slurm's order: by name (allocated TRES) or by TRES ID (requested TRES).

    ``names`` are without GRES types, since a typed entry may precede or follow the untyped one.
    """
    numbers = [_TRES_NUMBERS.get(name, len(_TRES_NUMBERS)) for name in names]
    return names == sorted(names) or numbers == sorted(numbers)


def _readings(pieces: list[str], header: Header) -> Iterator[list[str]]:
    """Yield all readings, those with the extra text in later columns first."""
    names, delimiter = header.names, header.delimiter or ""
    total, columns = len(pieces), len(names)
    dead: set[tuple[int, int]] = set()

    def walk(column: int, piece: int) -> Iterator[list[str]]:
        if column == columns:
            if piece == total:
                yield []
            return
        if (column, piece) in dead:
            return
        any_reading = False
        spare = total - piece - (columns - column)
        widths = [spare + 1] if column == columns - 1 else range(1, spare + 2)
        for width in widths:
            cell = delimiter.join(pieces[piece : piece + width])
            if width > 1 and names[column] not in FREE_TEXT and names[column] not in _FORMS:
                break
            if not fits(names[column], cell):
                continue
            for rest in walk(column + 1, piece + width):
                any_reading = True
                yield [cell, *rest]
        if not any_reading:
            dead.add((column, piece))

    yield from walk(0, 0)


_OWN_STEPS = ("batch", "extern", "interactive")
_SHOWN = 60
_MOST_LINES = 12
"""Maximum number of lines of a record with a multi-line text before the ID."""


class SlowPath:
    """Assembler of the irregular lines of one segment into records.

    A group begins with a line that has a job ID in the column of the job ID; the irregular lines after it belong to it.
    Irregular lines without such a first line continue the last text of the regular line before them if that is
    possible; otherwise they are not a record.

    If a text column precedes the ID, the first line of a record may not contain the ID. Then consecutive lines are
    divided so that as many as possible belong to a record in which each cell has the form of its column.
    """

    def __init__(self, lines: pl.Series, header: Header, first_line: int) -> None:
        self._lines = lines
        self._header = header
        self._first = first_line
        self.total = len(lines)
        self.rows: list[list[str]] = []
        self.row_lines: list[int] = []
        self.problems: list[Problem] = []
        self.grouped: set[int] = set()
        """Positions of regular lines that were added to a group."""
        self.continued: list[int] = []
        self.repaired = 0
        self.last_group = 0
        """Line at which the last group begins."""
        self.last_group_end = 0

    def run(self, irregular: list[int]) -> None:
        """Process the positions ``irregular``, which are in ascending order."""
        if self._header.text_before_id:
            self._run_before_id(irregular)
            return
        odd = set(irregular)
        position = 0
        while position < len(irregular):
            start = irregular[position]
            group = [start]
            position += 1
            while (
                position < len(irregular)
                and irregular[position] == group[-1] + 1
                and not self._begins(self._lines[group[-1] + 1])
            ):
                group.append(irregular[position])
                position += 1
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
                    self.grouped.add(end)
                self._take(cells, texts[low:high], self._first + start + low)

    def _cuts(self, texts: list[str]) -> Iterator[tuple[int, int, list[str] | None]]:
        """Yield the records in ``texts``: first line, line after the last, cells (``None``: a line outside records).

        The division has the fewest lines outside records, then the most records.
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
        """Return the cells if ``texts`` are one record, else ``None``."""
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
            self.grouped.add(before)
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
            # Delimiters in a text before the ID move the ID to the right.
            return any(fits("jobid", piece) for piece in pieces[header.id_column : header.id_column + extra + 1])
        if len(pieces) < min(header.id_column + 2, len(header.names)):
            return False
        return fits("jobid", pieces[header.id_column]) and all(
            fits(name, piece) for name, piece in zip(header.names, pieces[: header.id_column], strict=False)
        )

    def _goes_on(self, text: str) -> bool:
        """Return whether the last cell of a regular line may continue on the next line: it is text chosen by a user."""
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
            self._problem(line, job, f"{self._count(whole)}, and they are ambiguous")
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
        column = self._header.id_column
        return pieces[column] if column < len(pieces) and fits("jobid", pieces[column]) else None

    def _count(self, text: str) -> str:
        delimiter = self._header.delimiter
        cells = text.count(delimiter) + 1 - self._header.trailing if delimiter is not None else 1
        return f"{max(cells, 1)} of {len(self._header.names)} fields"

    def _problem(self, line: int, job: str | None, reason: str) -> None:
        self.problems.append(Problem(line, job, None, reason))


def _neighbours(positions: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the half-open ranges of consecutive ``positions``."""
    start = None
    for position, following in zip(positions, [*positions[1:], None], strict=True):
        start = position if start is None else start
        if following != position + 1:
            yield start, position + 1
            start = None


def printed_name(name: str) -> str:
    """Return the name of a column as sacct prints it."""
    return KNOWN.get(name.partition("#")[0], name)


def shorten(text: str) -> str:
    """Return ``text`` quoted, and short enough for one line of a message."""
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")


_LIMITED = {
    "jobname": "job_name", "admincomment": "admin_comment", "workdir": "work_dir", "submitline": "submit_line",
    "alloctres": "alloc_tres", "reqtres": "req_tres", "allocgres": "alloc_tres", "reqgres": "req_tres",
    "tresusageinmax": "tres_usage", "nodelist": "node_list", "jobid": "array_spec", "jobidraw": "array_spec",
}  # fmt: skip


def limit(name: str) -> str:
    """Return the name of the limit of a column in ``limits.FIELD_BYTES``."""
    return _LIMITED.get(name, name)


CHUNK_BYTES = 16 << 20
LINE = "#line"
"""Name of the column with the line number, from 1."""


@dataclass(frozen=True, slots=True)
class CellBlock:
    """A block of records, as strings."""

    cells: pl.DataFrame
    """``LINE`` (Int64) and the columns of ``header.names`` (String; an empty cell is empty or null).

    Without these columns, if they are in ``converted``.
    """
    header: Header
    problems: tuple[Problem, ...] = ()
    continued: tuple[int, ...] = ()
    """First lines of the records that span several lines."""
    repaired: int = 0
    """Number of records with the delimiter in a text."""
    not_utf8: int = 0
    """Number of bytes that were not UTF-8, now ``\\xNN``."""
    unfinished: int | None = None
    """First line of the last record if the last line has no newline."""
    converted: Mapping[str, native.Column] | None = None
    """The columns that are read, each cell not longer than ``limit`` permits."""


def read_blocks(
    stream: BinaryIO,
    *,
    where: str,
    delimiter: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    reject: Callable[[Problem], None] = lambda problem: None,
) -> Iterator[CellBlock]:
    """Yield the blocks of ``stream``; unreadable lines (``input_files.whole_lines``) are passed to ``reject``.

    Raises ``InputError`` if it is not sacct text.
    """
    header: Header | None = None
    line, rest = 1, b""
    unread: list[tuple[int, str, bytes]] = []
    pieces = whole_lines(
        stream.read,
        chunk_bytes,
        where=where,
        longest=ACCOUNTING_LINE_BYTES,
        reject=lambda *rejected: unread.append(rejected),
    )
    while True:
        data = next(pieces, b"")
        last = not data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        if header is None:
            data = rest + data
            blank = len(data) - len(data.lstrip(b"\n"))
            line, data = line + blank, data[blank:]
            if not last and b"\n" not in data:
                rest = data
                continue
            header, data = _first_header(data, where, delimiter)
            rest = b""
            line += 1
        while unread:
            reject(_left_out(*unread.pop(0), header))
        if last:
            data = rest + data
            yield from _blocks(data, header, line, delimiter, count_byte(data, b"\n"))[0]
            return
        if not (cut := _cut(data, header)):
            rest, data = b"", rest + data
            cut = _cut(data, header)
        if not cut and len(data) > 4 * max(chunk_bytes, ACCOUNTING_LINE_BYTES):
            cut = data.rfind(b"\n") + 1  # longer than any record, so unreadable
        if not cut:
            rest = data
            continue
        buffer = b"".join((rest, memoryview(data)[:cut]))  # copies once
        rest = data[cut:]
        ends = count_byte(buffer, b"\n")
        blocks, header = _blocks(buffer, header, line, delimiter, ends)
        yield from blocks
        line += ends


def _left_out(line: int, why: str, data: bytes, header: Header) -> Problem:
    """Return the problem for a skipped line that begins with ``data``, with its job and the column that caused it."""
    if header.delimiter is None:
        return Problem(line, None, None, why)
    cells = data.split(header.delimiter.encode())
    nul_cell = next((index for index, cell in enumerate(cells) if b"\0" in cell), None)
    cell_index = max(range(len(cells)), key=lambda index: len(cells[index])) if nul_cell is None else nul_cell
    job = cells[header.id_column].decode("utf-8", "replace") if header.id_column < min(cell_index, len(cells)) else ""
    field = printed_name(header.names[cell_index]) if cell_index < len(header.names) else None
    return Problem(line, job if fits("jobid", job) and job else None, field, why)


def _first_header(buffer: bytes, where: str, delimiter: str | None) -> tuple[Header, bytes]:
    first, _, rest = buffer.partition(b"\n")
    if not first.strip():
        raise InputError("the file is empty", where=where)
    return parse_header(first.decode("utf-8", "backslashreplace"), where=where, delimiter=delimiter), rest


def _cut(buffer: bytes, header: Header) -> int:
    """Return the start of the last regular line: the lines after it may still belong to it.

    If a text column precedes the ID, the lines before a regular line may belong to it, too, unless they are regular.
    """
    needle = (header.delimiter or "\n").encode()
    end = buffer.rfind(b"\n")
    begun = None
    while end > 0:
        start = buffer.rfind(b"\n", 0, end) + 1
        regular = header.delimiter is None or buffer.count(needle, start, end) == header.delimiters
        if regular and not header.text_before_id:
            return start
        if regular and begun is not None:
            return begun
        begun = start if regular else None
        end = start - 1
    return 0


def _lines(data: bytes) -> pl.Series:
    """Return the lines of ``data``, empty ones as empty strings. The separator is NUL, which the input never has."""
    if data.count(b"\n") == len(data):
        return pl.Series("lines", [""] * len(data), dtype=pl.String)
    lines = pl.read_csv(
        data, separator="\0", quote_char=None, has_header=False, new_columns=["lines"], infer_schema=False
    )
    return lines["lines"].fill_null("")


def _header_lines(lines: pl.Series, delimiter: str | None) -> list[tuple[int, Header]]:
    likely = lines.str.contains("(?i)jobid").arg_true().to_list()
    headers = ((i, find_header(lines[i], delimiter)) for i in likely)
    return [(i, header) for i, header in headers if header is not None]


def _utf8(data: bytes) -> tuple[bytes, int]:
    """Return ``data`` as UTF-8, with invalid bytes as ``\\xNN``, and the number of invalid bytes."""
    try:
        if not data.isascii():
            data.decode("utf-8")
    except UnicodeDecodeError:
        wrong = len(data) - len(data.decode("utf-8", "ignore").encode())
        return data.decode("utf-8", "backslashreplace").encode(), wrong
    return data, 0


def _blocks(
    buffer: bytes, header: Header, first_line: int, delimiter: str | None, ends: int
) -> tuple[list[CellBlock], Header]:
    """Split at headers within the text (concatenated files); also return the header in force at the end.

    ``ends``: number of line ends in the text.
    """
    if not buffer:
        return [], header
    if buffer.endswith(b"\n") and (converted := _regular(buffer, header, ends)) is not None:
        numbers = pl.int_range(first_line, first_line + ends, eager=True, dtype=pl.Int64).alias(LINE)
        return [CellBlock(numbers.to_frame(), header, converted=converted)], header
    data, wrong = _utf8(buffer)
    lines = _lines(data)
    headers = _header_lines(lines, delimiter)
    if not headers:
        block = _block(lines, header, first_line, complete=buffer.endswith(b"\n"))
        return [replace(block, not_utf8=wrong)], header
    bounds = [(-1, header), *headers, (len(lines), header)]
    blocks: list[CellBlock] = []
    for (begin, current), (end, _) in itertools.pairwise(bounds):
        if end > begin + 1:
            complete = end < len(lines) or buffer.endswith(b"\n")
            part = lines.slice(begin + 1, end - begin - 1)
            blocks.append(_block(part, current, first_line + begin + 1, complete=complete))
    if blocks:
        blocks[0] = replace(blocks[0], not_utf8=wrong)
    return blocks, headers[-1][1]


_KINDS = {
    **dict.fromkeys(("jobid", "jobidraw"), Kind.IDENTIFIERS),
    **dict.fromkeys(_TIMES, Kind.CLOCKS),
    **dict.fromkeys(("elapsed", "suspended", "totalcpu", "usercpu", "systemcpu"), Kind.SPANS),
    **dict.fromkeys(
        ("elapsedraw", "priority", "uid", "nnodes", "allocnodes", "reqnodes", "alloccpus", "ncpus", "reqcpus", "ntasks",
         "consumedenergyraw"), Kind.INTEGERS
    ),
    "maxrss": Kind.SIZES,
    "tresusageinmax": Kind.USAGES,
}  # fmt: skip
"""Columns whose cells are usually in a simple form."""


def _regular(data: bytes, header: Header, lines: int) -> Mapping[str, native.Column] | None:
    """Return the columns that are read if the library can split all lines, and no cell is too long.

    All text is UTF-8, and each line has the right number of delimiters. No cell is the name of an ID column: that is a
    header with other columns, of a concatenated file.
    """
    if header.delimiter is None or len(header.delimiter.encode()) != 1:
        return None
    kinds = {name: _KINDS.get(name, Kind.TEXTS) if name in USED else Kind.SKIPPED for name in header.names}
    if "maxrss" not in kinds and "tresusageinmax" in kinds:
        kinds["tresusageinmax"] = Kind.TEXTS  # also for the memory of processes
    if header.trailing:
        kinds["#trailing"] = Kind.SKIPPED
    printed = "jobid" if "jobid" in kinds else "jobidraw"
    read = native.read(data, header.delimiter, kinds, lines, texts_of=printed, refused=("JobID", "JobIDRaw"))
    if read is None:
        return None
    columns, longest = read
    if any(longest[name] > most_bytes(limit(name)) for name in header.names):
        return None
    ids = cast("native.Parsed", columns[header.names[header.id_column]])
    if ids.cells.str.to_lowercase().is_in(["jobid", "jobidraw"]).any():
        return None
    texts = cast("pl.Series", cast("native.Parsed", columns[printed]).texts)
    if "jobidraw" in columns and texts.has_nulls():  # the text of such an ID is in the other column
        return None
    return columns


def _block(lines: pl.Series, header: Header, first_line: int, *, complete: bool) -> CellBlock:
    """Split the ``lines`` below one header; irregular lines take the slow path."""
    total = len(lines)
    regular = (
        lines != ""
        if header.delimiter is None
        else lines.str.count_matches(header.delimiter, literal=True) == header.delimiters
    )
    numbers = pl.int_range(first_line, first_line + total, eager=True, dtype=pl.Int64).alias(LINE)
    last = first_line + total - 1
    if regular.all():
        cells = _cells(lines, header).insert_column(0, numbers)
        return CellBlock(cells, header, unfinished=None if complete else last)
    slow = SlowPath(lines, header, first_line)
    slow.run((~regular).arg_true().to_list())
    if slow.grouped:
        regular = regular.scatter(sorted(slow.grouped), [False] * len(slow.grouped))
    cells = _cells(lines.filter(regular), header).insert_column(0, numbers.filter(regular))
    if slow.rows:
        extra = pl.DataFrame(slow.rows, schema=dict.fromkeys(header.names, pl.String), orient="row")
        extra.insert_column(0, pl.Series(LINE, slow.row_lines, dtype=pl.Int64))
        cells = pl.concat([cells, extra]).sort(LINE)
    unfinished = None if complete else (slow.last_group if slow.last_group_end == last else last)
    return CellBlock(cells, header, tuple(slow.problems), tuple(slow.continued), slow.repaired, unfinished=unfinished)


def _cells(lines: pl.Series, header: Header) -> pl.DataFrame:
    """Split regular lines into cells."""
    if header.delimiter is None:
        return pl.DataFrame({header.names[0]: lines})
    if lines.is_empty():
        return pl.DataFrame(schema=dict.fromkeys(header.names, pl.String))
    columns = lines.str.split_exact(header.delimiter, header.delimiters).struct.unnest()
    columns.columns = [*header.names, "#trailing"] if header.trailing else list(header.names)
    return columns.select(header.names)
