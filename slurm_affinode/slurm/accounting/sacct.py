"""Reader of sacct output: text with any fields and delimiter, or ``sacct --json``."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.input_files import (
    DAMAGED,
    MAGIC_BYTES,
    compression,
    document,
    is_binary,
    unpacked,
    utf8_stream,
)
from slurm_affinode.slurm.accounting.records import Divided, assemble, divide, joined
from slurm_affinode.slurm.accounting.sacct_columns import Converter, Shared
from slurm_affinode.slurm.accounting.sacct_lines import CHUNK_BYTES, CellBlock, read_blocks
from slurm_affinode.slurm.accounting.schema import Accounting, Problem, TimeDecision

_MAGIC = {
    b"PAR1": "a Parquet file",
    b"SQLite format 3": "an SQLite file",
    b"PK\x03\x04": "a zip archive",
    b"\x7fELF": "a program",
}
_BOM = b"\xef\xbb\xbf"
_LINES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SacctReading:
    """Settings for input that is not self-describing."""

    cluster: str = "default"
    """Cluster of records that do not name one."""
    zone: str = "UTC"
    """IANA zone of times without an offset."""
    delimiter: str | None = None
    """Delimiter; ``None``: detect it in the header."""
    strict: bool = False
    """Raise at the first problem."""
    counting: frozenset[str] = frozenset()
    """Clusters known to count GPUs in accounting (see ``records.assemble``)."""
    chunk_bytes: int = CHUNK_BYTES
    """Size of the chunks of text that are converted at a time."""


def read(
    source: Path | bytes | BinaryIO,
    *,
    where: str | None = None,
    reading: SacctReading | None = None,
    advance: Callable[[int], object] | None = None,
) -> Accounting:
    """Read one input: sacct text or JSON, plain or compressed. ``advance`` gets the record count of each block of text.

    Raises ``InputError`` if the input as a whole cannot be used (empty, binary, truncated, another format) and, with
    ``reading.strict``, at the first problem. Otherwise bad records are listed as problems and the others are read.
    """
    name = where or (str(source) if isinstance(source, Path) else "-")
    options = reading or SacctReading()
    try:
        with _opened(source, name) as (stream, packed):
            head = stream.peek(4096)[:4096]
            _refuse_binary(head, name)
            if head.startswith(_BOM):
                stream.read(len(_BOM))
            if head.removeprefix(_BOM).lstrip()[:1] in (b"{", b"["):
                from slurm_affinode.slurm.accounting import sacct_json  # noqa: PLC0415 - most inputs are text

                data = document(stream, where=name, packed=packed)
                return _read_json(sacct_json.read(data, where=name, cluster=options.cluster), name, options)
            return _read_text(stream, name, options, advance)
    except DAMAGED as error:
        raise InputError(f"the compressed file is damaged or cut: {error}", where=name) from error
    except FileNotFoundError as error:
        raise InputError("no such file", where=name) from error
    except IsADirectoryError as error:
        raise InputError("this is a directory", where=name, hint="give the file that sacct wrote") from error
    except OSError as error:
        what = "the compressed file is damaged or cut" if error.errno is None else "cannot be read"
        raise InputError(f"{what}: {error.strerror or error}", where=name) from error


@contextlib.contextmanager
def _opened(source: Path | bytes | BinaryIO, name: str) -> Iterator[tuple[io.BufferedReader, bool]]:
    """Open ``source`` decompressed, and return whether it was compressed. A stream of the caller is not closed."""
    with contextlib.ExitStack() as stack:
        if isinstance(source, Path):
            opened: BinaryIO = stack.enter_context(source.open("rb"))
        else:
            opened = io.BytesIO(source) if isinstance(source, bytes) else source
        buffered = opened if isinstance(opened, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, opened))
        head = buffered.peek(MAGIC_BYTES)
        if not head:
            raise InputError("the file is empty", where=name)
        if (kind := compression(head)) is not None:
            inside = stack.enter_context(unpacked(buffered, kind, where=name))
            yield utf8_stream(io.BufferedReader(cast(io.RawIOBase, inside))), True
        else:
            yield utf8_stream(buffered), False


def _refuse_binary(head: bytes, name: str) -> None:
    if not head.strip():
        raise InputError("the file is empty", where=name)
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            raise InputError(f"this is {what}, not sacct output", where=name)
    if is_binary(head):
        raise InputError("this is a binary file, not sacct output", where=name)


def _read_text(
    stream: BinaryIO, name: str, options: SacctReading, advance: Callable[[int], object] | None
) -> Accounting:
    divided: list[Divided] = []
    problems: list[Problem] = []
    decisions: list[TimeDecision] = []
    blocks: list[CellBlock] = []
    shared = Shared()
    unfinished = None

    def reject(problem: Problem) -> None:
        if options.strict:
            raise _first_problem(problem, name, "line")
        problems.append(problem)

    read_ = read_blocks(stream, where=name, delimiter=options.delimiter, chunk_bytes=options.chunk_bytes, reject=reject)
    for block in _split_ahead(read_):
        converter = Converter(block, zone=options.zone, cluster=options.cluster, shared=shared)
        divided.append(divide(converter.convert()))  # by block: all records at once would need twice the memory
        block_problems = sorted([*block.problems, *converter.problems], key=lambda problem: problem.line or 0)
        unfinished = block.unfinished
        if unfinished is not None and (_cut_name(block) or any((p.line or 0) >= unfinished for p in block_problems)):
            raise InputError(
                "the file ends within a record: it was cut",
                where=f"{name}:{unfinished}",
                hint="make or copy the file again",
            )
        if options.strict and block_problems:
            raise _first_problem(block_problems[0], name, "line")
        problems.extend(block_problems)
        decisions.extend(converter.decisions)
        blocks.append(replace(block, cells=block.cells.clear(), converted=None))
        if advance is not None:
            advance(block.cells.height + len(block.problems))
    records = joined(divided)
    count = records.height + sum(problem.dropped for problem in problems)
    complete = _assembled(records, problems, name, options, unit="line")
    return replace(complete, records=count, decisions=tuple(decisions), notes=_notes(blocks, records, unfinished))


def _split_ahead(blocks: Iterator[CellBlock]) -> Iterator[CellBlock]:
    """Yield ``blocks``; a thread splits the next one while the last one is converted. Both release the GIL."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="sacct") as pool:
        next_block = pool.submit(next, blocks, None)
        while (block := next_block.result()) is not None:
            next_block = pool.submit(next, blocks, None)
            yield block


def _cut_name(block: CellBlock) -> bool:
    """Return whether the last line was cut within its last field: the name of a batch or extern step is incomplete."""
    if block.header.names[-1] != "jobname" or block.cells.is_empty():
        return False
    step = str(block.cells[-1, block.header.names[block.header.id_column]]).partition(".")[2]
    return step in ("batch", "extern") and block.cells[-1, "jobname"] != step


def _read_json(read_: tuple[pl.DataFrame, list[Problem], list[str]], name: str, options: SacctReading) -> Accounting:
    rows, problems, notes = read_
    records = divide(rows)
    if options.strict and problems:
        raise _first_problem(problems[0], name, "record")
    count = records.height + sum(problem.dropped for problem in problems)
    return replace(_assembled(records, problems, name, options, unit="record"), records=count, notes=tuple(notes))


def _assembled(records: Divided, problems: list[Problem], name: str, options: SacctReading, *, unit: str) -> Accounting:
    jobs, steps, lost = assemble(records, counting=options.counting | records.gpu_clusters)
    if options.strict and lost:
        raise _first_problem(lost[0], name, unit)
    everything = sorted([*problems, *lost], key=lambda problem: problem.line or 0)
    if jobs.is_empty() and any(problem.dropped for problem in everything):
        bad = sum(problem.dropped for problem in everything)
        first = everything[0]
        raise InputError(
            f"none of {bad} record{'s' * (bad != 1)} can be used; the first, {unit} {first.line}: {first}",
            where=name,
            hint="does the header belong to these lines, with the same delimiter?" if unit == "line" else None,
        )
    return Accounting(jobs=jobs, steps=steps, problems=tuple(everything), unit=unit, gpu_clusters=records.gpu_clusters)


def _first_problem(problem: Problem, name: str, unit: str) -> InputError:
    where = f"{name}:{problem.line}" if unit == "line" else f"{name}, {unit} {problem.line}"
    return InputError(str(problem), where=where, hint="without --strict this is reported and the rest is read")


def _notes(blocks: list[CellBlock], records: Divided, unfinished: int | None) -> tuple[str, ...]:
    wrong = sum(block.not_utf8 for block in blocks)
    continued = [line for block in blocks for line in block.continued]
    repaired = sum(block.repaired for block in blocks)
    stand_ins, no_end = records.stand_ins, records.endless
    notes = [
        (wrong, f"{_counted(wrong, 'byte is', 'bytes are')} not UTF-8 and shown as \\xNN"),
        (continued, _over_lines(continued)),
        (repaired, f"{_counted(repaired, 'record holds', 'records hold')} the delimiter in a text"),
        (
            stand_ins,
            f"{_counted(stand_ins, 'record', 'records')} of array tasks without a raw ID (no JobIDRaw column): they "
            "get negative substitutes, which GPU labels cannot name",
        ),
        (
            no_end,
            f"{_counted(no_end, 'run is', 'runs are')} over, but without End and Elapsed: counted as running",
        ),
        (unfinished, "the last line has no newline: the file may have been cut at a record's end"),
    ]
    return tuple(text for present, text in notes if present)


def _counted(number: int, singular: str, plural: str) -> str:
    return f"{number:,} {singular if number == 1 else plural}"


def _over_lines(first_lines: list[int]) -> str:
    """Return the note on records over several lines; a stray line would look like the rest of a name."""
    if not first_lines:
        return ""
    shown = ", ".join(map(str, first_lines[:_LINES_SHOWN])) + (", ..." if len(first_lines) > _LINES_SHOWN else "")
    counted = _counted(len(first_lines), "record goes", "records go")
    return f"{counted} over several lines (a newline in a text), from line {shown}"
