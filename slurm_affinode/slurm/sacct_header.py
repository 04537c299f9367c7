"""The header line of sacct text: which columns there are and what stands between them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_affinode.errors import InputError
from slurm_affinode.slurm.fields import FREE_TEXT, KNOWN

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_NOT_NAME = re.compile(r"[^A-Za-z0-9_%]+")
_WIDTH = re.compile(r"%-?\d+$")
_TABLE = re.compile(r"^\s*JobID\s{2,}|^\s*\S+(\s{2,}\S+)+\s*$", re.IGNORECASE)
_HINT = "make the input with: sacct --parsable2 --allusers --duplicates --format=JobIDRaw,JobID,..."


@dataclass(frozen=True, slots=True)
class Header:
    """The columns of the lines that follow."""

    names: tuple[str, ...]
    """Lower case, as in ``fields.KNOWN``; a column that is there twice has ``#2`` after its name the second time."""
    delimiter: str | None
    """``None`` where there is one column alone."""
    trailing: bool
    """Whether every line ends with a delimiter (``sacct --parsable``)."""

    @property
    def delimiters(self) -> int:
        """How many delimiters a line has that holds none in its texts."""
        return len(self.names) - 1 + self.trailing

    @property
    def id_column(self) -> int:
        """The position of the job id."""
        return self.names.index("jobidraw" if "jobidraw" in self.names else "jobid")

    @property
    def text_before_id(self) -> bool:
        """Whether a text that a person chose stands before the job id."""
        return not FREE_TEXT.isdisjoint(self.names[: self.id_column])


def parse_header(line: str, *, where: str, delimiter: str | None = None) -> Header:
    """Read the header ``line``; without ``delimiter`` it is found from the known names of columns.

    Raises ``InputError`` saying what the file seems to be instead.
    """
    header = find_header(line, delimiter)
    if header is not None:
        return header
    if delimiter is not None:
        sniffed = find_header(line, None)
        if sniffed is not None and sniffed.delimiter is not None:
            raise InputError(
                f"the header is not separated by {delimiter!r} but by {sniffed.delimiter!r}",
                where=where,
                hint="leave --delimiter out, or give the one that sacct was run with",
            )
    lowered = [word.lower() for word in re.split(r"[^A-Za-z0-9_]+", line) if word]
    if _TABLE.match(line) and any(word in KNOWN for word in lowered):
        raise InputError("this is sacct's table for people, whose cells are cut", where=where, hint=_HINT)
    if any(word in KNOWN for word in lowered) and not {"jobid", "jobidraw"} & set(lowered):
        raise InputError("the header has neither JobID nor JobIDRaw", where=where, hint=_HINT)
    if re.match(r"^\d+([_+.]\S*)?[^\w\s]", line):
        raise InputError("the first line is no header", where=where, hint="run sacct without --noheader")
    raise InputError("this is not sacct output: the first line is not a header of sacct", where=where, hint=_HINT)


def find_header(line: str, delimiter: str | None) -> Header | None:
    """The header that ``line`` is, or ``None``: at least half the names are known, and one of them is a job id."""
    if not line or len(line) > 10_000:
        return None
    if delimiter is not None:
        return _header(line, delimiter)
    return next((found for d in _delimiters(line) if (found := _header(line, d)) is not None), None)


def _delimiters(line: str) -> list[str | None]:
    """What may stand between the names, likeliest first."""
    first = _NAME.match(line)
    if first is None:
        return []
    if first.end() == len(line):
        candidates: list[str | None] = [None]
    else:
        gap = _NOT_NAME.match(line, _width_end(line, first.end()))
        candidates = [gap[0]] if gap is not None else []
    # A delimiter of letters or digits: whatever follows a known name and makes the rest known names too.
    for length in range(min(first.end(), 24), 1, -1):
        if line[:length].lower() in KNOWN:
            candidates.extend(line[length : length + size] for size in range(1, 9) if length + size <= len(line))
    return candidates


def _width_end(line: str, position: int) -> int:
    match = re.compile(r"%-?\d+").match(line, position)
    return position if match is None else match.end()


def _header(line: str, delimiter: str | None) -> Header | None:
    cells = [line] if delimiter is None else line.split(delimiter)
    trailing = len(cells) > 1 and cells[-1] == ""
    if trailing:
        cells = cells[:-1]
    names = [_WIDTH.sub("", cell.strip()).lower() for cell in cells]
    if not all(_NAME.fullmatch(name) for name in names) or not {"jobid", "jobidraw"} & set(names):
        return None
    if 2 * sum(name in KNOWN for name in names) < len(names):
        return None
    unique: list[str] = []
    for name in names:
        times = sum(seen.partition("#")[0] == name for seen in unique)
        unique.append(f"{name}#{times + 1}" if times else name)
    return Header(tuple(unique), delimiter if len(unique) > 1 or trailing else None, trailing)
