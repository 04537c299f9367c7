"""Lines of sacct text with more delimiters than columns: find the one reading that makes sense.

Text that a person chose (a job's name, its command line) may hold the delimiter. Every other column has a form, so
most damaged lines have exactly one reading in which each cell has the form of its column.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from slurm_affinode.slurm import jobid
from slurm_affinode.slurm.fields import FREE_TEXT, USED
from slurm_affinode.slurm.sacct_header import Header

_TIME = (
    r"(?:|Unknown|None|N/A|INVALID|0|\d{9,11}|\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)"
)
_SPAN = r"(?:|(?:\d+-)?\d+(?::\d+){0,2}(?:\.\d+)?|UNLIMITED|Partition_Limit|INVALID|Unknown)"
_NUMBER = r"(?:|\?|-?\d+(?:\.\d+)?[KMGTPE]?[nc?]?|Unknown|UNLIMITED|Partition_Limit|NOT_SET)"
# No name twice: where a comma is the delimiter, two TRES columns side by side are told apart by that.
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
    **dict.fromkeys(("jobid", "jobidraw"), jobid.PATTERN.strip("^$")),
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
    """Whether ``cell`` has the form of the column ``name``; columns without a form take any one line."""
    return name in FREE_TEXT or _form(name).fullmatch(cell) is not None


def repair(pieces: list[str], header: Header) -> list[str] | None:
    """Give each column its part of ``pieces``, the texts between the delimiters of one record.

    ``None`` where no reading has every cell in the form of its column, or several differ in what the figures
    need. Lists of resources are read as long as they are in Slurm's order. Among readings that differ in texts alone: a
    SubmitLine that begins as a command line, then the text in the last column.
    """
    if header.trailing:
        if pieces[-1].strip():
            return None
        pieces = pieces[:-1]
    if len(pieces) < len(header.names):
        return None
    found: list[list[str]] = []
    for cells in _readings(pieces, header):
        found.append(cells)
        if len(found) >= _MAX_READINGS:
            break
    if not found:
        return None
    found = _longest_lists(found, header)
    fixed = [i for i, name in enumerate(header.names) if name in USED and name not in FREE_TEXT]
    if any([cells[i] for i in fixed] != [found[0][i] for i in fixed] for cells in found[1:]):
        return None
    if "submitline" in header.names:
        at = header.names.index("submitline")
        found = [cells for cells in found if _COMMAND.match(cells[at])] or found
    return found[0]


def _longest_lists(found: list[list[str]], header: Header) -> list[list[str]]:
    """The readings in which most lists of resources are in order, then those that have most resources."""
    lists = [i for i, name in enumerate(header.names) if name in ("alloctres", "reqtres")]

    def worth(cells: list[str]) -> tuple[int, int]:
        named = [[re.split("[:=]", part)[0] for part in cells[i].split(",")] for i in lists]
        return sum(map(_in_order, named)), sum(map(len, named))

    worths = [worth(cells) for cells in found]
    return [cells for cells, value in zip(found, worths, strict=True) if value == max(worths)]


def _in_order(names: list[str]) -> bool:
    """By name, as Slurm prints what was allocated, or by its numbers of them, as it keeps what was asked for; without
    types, which may stand on either side."""
    numbers = [_TRES_NUMBERS.get(name, len(_TRES_NUMBERS)) for name in names]
    return names == sorted(names) or numbers == sorted(numbers)


def _readings(pieces: list[str], header: Header) -> Iterator[list[str]]:
    """All readings, those with the extra text in later columns first."""
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
        any_found = False
        spare = total - piece - (columns - column)
        widths = [spare + 1] if column == columns - 1 else range(1, spare + 2)
        for width in widths:
            cell = delimiter.join(pieces[piece : piece + width])
            if width > 1 and names[column] not in FREE_TEXT and names[column] not in _FORMS:
                break
            if not fits(names[column], cell):
                continue
            for rest in walk(column + 1, piece + width):
                any_found = True
                yield [cell, *rest]
        if not any_found:
            dead.add((column, piece))

    yield from walk(0, 0)
