"""sacct text -> cells: bytes in, blocks of string columns out, a few tens of MiB at a time.

Regular lines (the right number of delimiters) are split by Polars, all at once. The rest takes a slow path: records
over several lines (a newline in a name), delimiters in names, lines that are cut, headers in the middle.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

import polars as pl

from slurm_affinode.errors import InputError
from slurm_affinode.limits import ACCOUNTING_LINE_BYTES
from slurm_affinode.packed import whole_lines
from slurm_affinode.slurm.accounting import Problem
from slurm_affinode.slurm.sacct_header import Header, find_header, parse_header
from slurm_affinode.slurm.sacct_records import SlowPath, printed_name
from slurm_affinode.slurm.sacct_repair import fits

CHUNK_BYTES = 16 << 20
LINE = "#line"
"""The column with the number of the line, from 1."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some records, as strings."""

    cells: pl.DataFrame
    """``LINE`` (Int64) and the columns of ``header.names`` (String; an empty cell is empty or null)."""
    header: Header
    problems: tuple[Problem, ...] = ()
    continued: tuple[int, ...] = ()
    """First lines of the records that were put together from several lines."""
    repaired: int = 0
    """Records in which a delimiter was found to belong to a text."""
    not_utf8: int = 0
    """Bytes that were not UTF-8, now ``\\xNN``."""
    unfinished: int | None = None
    """Where the last line has no newline: the line at which its record begins."""


def read_blocks(
    stream: BinaryIO,
    *,
    where: str,
    delimiter: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    reject: Callable[[Problem], None] = lambda problem: None,
) -> Iterator[Block]:
    """Read ``stream`` to its end; ``reject`` hears of lines that cannot be read (``packed.whole_lines``).

    Raises ``InputError`` where it is no sacct text.
    """
    header: Header | None = None
    line, rest = 1, b""
    unread: list[tuple[int, str, bytes]] = []
    pieces = whole_lines(
        stream.read,
        chunk_bytes,
        where=where,
        longest=ACCOUNTING_LINE_BYTES,
        reject=lambda *found: unread.append(found),
    )
    while True:
        data = next(pieces, b"")
        buffer = rest + data if rest else data
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        if header is None:
            blank = len(buffer) - len(buffer.lstrip(b"\n"))
            line, buffer = line + blank, buffer[blank:]
            if data and b"\n" not in buffer:
                rest = buffer
                continue
            header, buffer = _first_header(buffer, where, delimiter)
            line += 1
        while unread:
            reject(_left_out(*unread.pop(0), header))
        if not data:
            yield from _blocks(buffer, header, line, delimiter)[0]
            return
        cut = _cut(buffer, header)
        if not cut and len(buffer) > 4 * max(chunk_bytes, ACCOUNTING_LINE_BYTES):
            cut = buffer.rfind(b"\n") + 1  # no record goes on for so long: nothing in it can be read
        rest = buffer[cut:]
        if cut:
            blocks, header = _blocks(buffer[:cut], header, line, delimiter)
            yield from blocks
            line += buffer.count(b"\n", 0, cut)


def _left_out(line: int, why: str, data: bytes, header: Header) -> Problem:
    """The problem of a line that begins with ``data`` and is not read: its job, and the column that is to blame."""
    if header.delimiter is None:
        return Problem(line, None, None, why)
    cells = data.split(header.delimiter.encode())
    odd = next((at for at, cell in enumerate(cells) if b"\0" in cell), None)
    at = max(range(len(cells)), key=lambda at: len(cells[at])) if odd is None else odd
    job = cells[header.id_column].decode("utf-8", "replace") if header.id_column < min(at, len(cells)) else ""
    field = printed_name(header.names[at]) if at < len(header.names) else None
    return Problem(line, job if fits("jobid", job) and job else None, field, why)


def _first_header(buffer: bytes, where: str, delimiter: str | None) -> tuple[Header, bytes]:
    first, _, rest = buffer.partition(b"\n")
    if not first.strip():
        raise InputError("the file is empty", where=where)
    return parse_header(first.decode("utf-8", "backslashreplace"), where=where, delimiter=delimiter), rest


def _cut(buffer: bytes, header: Header) -> int:
    """Where the last regular line begins: what follows it may still belong to it.

    Where a text stands before the id, what stands before a regular line may belong to it, unless that is regular, too.
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
    """The lines of ``data``, empty ones as empty strings. NUL separates nothing: the input has none."""
    if data.count(b"\n") == len(data):
        return pl.Series("lines", [""] * len(data), dtype=pl.String)
    return _csv(data, "\0", ["lines"])["lines"].fill_null("")


def _csv(data: bytes, separator: str, names: list[str]) -> pl.DataFrame:
    return pl.read_csv(
        data, separator=separator, quote_char=None, has_header=False, new_columns=names, infer_schema=False
    )


def _header_lines(lines: pl.Series, delimiter: str | None) -> list[tuple[int, Header]]:
    likely = lines.str.contains("(?i)jobid").arg_true().to_list()
    found = ((i, find_header(lines[i], delimiter)) for i in likely)
    return [(i, header) for i, header in found if header is not None]


def _utf8(data: bytes) -> tuple[bytes, int]:
    """``data`` as UTF-8, bytes that are not written as ``\\xNN``, and how many those were."""
    try:
        if not data.isascii():
            data.decode("utf-8")
    except UnicodeDecodeError:
        wrong = len(data) - len(data.decode("utf-8", "ignore").encode())
        return data.decode("utf-8", "backslashreplace").encode(), wrong
    return data, 0


def _blocks(buffer: bytes, header: Header, first_line: int, delimiter: str | None) -> tuple[list[Block], Header]:
    """Split at headers in the middle (of files put one after the other); also the header that is in force then."""
    if not buffer:
        return [], header
    quick = _regular(buffer, header)
    if quick is not None:
        count = quick.height
        numbers = pl.int_range(first_line, first_line + count, eager=True, dtype=pl.Int64).alias(LINE)
        unfinished = None if buffer.endswith(b"\n") else first_line + count - 1
        return [Block(quick.insert_column(0, numbers), header, unfinished=unfinished)], header
    data, wrong = _utf8(buffer)
    lines = _lines(data)
    headers = _header_lines(lines, delimiter)
    if not headers:
        block = _block(lines, header, first_line, complete=buffer.endswith(b"\n"))
        return [replace(block, not_utf8=wrong)], header
    bounds = [(-1, header), *headers, (len(lines), header)]
    blocks: list[Block] = []
    for (at, current), (end, _) in itertools.pairwise(bounds):
        if end > at + 1:
            complete = end < len(lines) or buffer.endswith(b"\n")
            part = lines.slice(at + 1, end - at - 1)
            blocks.append(_block(part, current, first_line + at + 1, complete=complete))
    if blocks:
        blocks[0] = replace(blocks[0], not_utf8=wrong)
    return blocks, headers[-1][1]


def _regular(data: bytes, header: Header) -> pl.DataFrame | None:
    """The cells, where all is UTF-8 and every line has exactly the delimiters that it should; else ``None``.

    Polars refuses what is not UTF-8 and a line with more fields than the first, and fills one with fewer; so where
    the delimiters are as many as all lines should have together, each line has its own.
    """
    if header.delimiter is None or len(header.delimiter.encode()) != 1:
        return None
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    if data.count(header.delimiter.encode()) != lines * header.delimiters:
        return None
    names = [*header.names, "#trailing"] if header.trailing else list(header.names)
    try:
        cells = _csv(data, header.delimiter, names)
    except pl.exceptions.PolarsError:
        return None
    if cells.width != len(names) or cells.height != lines or _names_an_id(data, header.delimiter):
        return None
    ids = cells[header.names[header.id_column]]
    if ids.str.len_bytes().is_in([5, 8]).any() and ids.str.to_lowercase().is_in(["jobid", "jobidraw"]).any():
        return None
    return cells.select(header.names)


def _names_an_id(data: bytes, delimiter: str) -> bool:
    """Whether a cell may be the name of a column of ids: a header of other columns, of a file put behind this one."""
    if b"JobID" not in data:
        return False
    edge = rb"(?:^|\n|$|%b)" % re.escape(delimiter.encode())
    return re.search(rb"%bJobID(?:Raw)?%b" % (edge, edge), data) is not None


def _block(lines: pl.Series, header: Header, first_line: int, *, complete: bool) -> Block:
    """Split ``lines`` of one header, the slow way for those that are irregular."""
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
        return Block(cells, header, unfinished=None if complete else last)
    slow = SlowPath(lines, header, first_line)
    slow.run((~regular).arg_true().to_list())
    if slow.taken:
        regular = regular.scatter(sorted(slow.taken), [False] * len(slow.taken))
    cells = _cells(lines.filter(regular), header).insert_column(0, numbers.filter(regular))
    if slow.rows:
        extra = pl.DataFrame(slow.rows, schema=dict.fromkeys(header.names, pl.String), orient="row")
        extra.insert_column(0, pl.Series(LINE, slow.row_lines, dtype=pl.Int64))
        cells = pl.concat([cells, extra]).sort(LINE)
    unfinished = None if complete else (slow.last_group if slow.last_group_end == last else last)
    return Block(cells, header, tuple(slow.problems), tuple(slow.continued), slow.repaired, unfinished=unfinished)


def _cells(lines: pl.Series, header: Header) -> pl.DataFrame:
    """The cells of regular lines."""
    if header.delimiter is None:
        return pl.DataFrame({header.names[0]: lines})
    if lines.is_empty():
        return pl.DataFrame(schema=dict.fromkeys(header.names, pl.String))
    columns = lines.str.split_exact(header.delimiter, header.delimiters).struct.unnest()
    columns.columns = [*header.names, "#trailing"] if header.trailing else list(header.names)
    return columns.select(header.names)
