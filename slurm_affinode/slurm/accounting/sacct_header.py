"""Header of sacct text: delimiter, columns, and which columns contain free text.

Names are those of ``sacct --helpformat`` from Slurm 20.02 to 26.05, and of the manual page of 14.11 for older ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_affinode.base.errors import InputError

_NAMES = """
Account AdminComment AllocCPUS AllocGRES AllocNodes AllocTRES AssocID AveCPU AveCPUFreq AveDiskRead AveDiskWrite
AvePages AveRSS AveVMSize BlockID Cluster Comment ConsumedEnergy ConsumedEnergyRaw Constraints Container CPUTime
CPUTimeRAW DBIndex DerivedExitCode Elapsed ElapsedRaw Eligible End ExitCode Extra FailedNode Flags GID Group HetJobID
HetJobOffset JobID JobIDRaw JobName Layout Licenses MaxDiskRead MaxDiskReadNode MaxDiskReadTask MaxDiskWrite
MaxDiskWriteNode MaxDiskWriteTask MaxPages MaxPagesNode MaxPagesTask MaxRSS MaxRSSNode MaxRSSTask MaxVMSize
MaxVMSizeNode MaxVMSizeTask McsLabel MinCPU MinCPUNode MinCPUTask NCPUS NNodes NodeList NTasks PackJobID PackJobOffset
Partition Planned PlannedCPU PlannedCPURAW Priority QOS QOSRAW QOSREQ Reason ReqCPUFreq ReqCPUFreqGov ReqCPUFreqMax
ReqCPUFreqMin ReqCPUS ReqGRES ReqMem ReqNodes ReqReservation ReqTRES Reservation ReservationId Reserved ResvCPU
ResvCPURAW Restarts SegmentSize SLUID Start State StdErr StdIn StdOut Submit SubmitLine Suspended SystemComment
SystemCPU Timelimit TimelimitRaw TotalCPU TRESUsageInAve TRESUsageInMax TRESUsageInMaxNode TRESUsageInMaxTask
TRESUsageInMin TRESUsageInMinNode TRESUsageInMinTask TRESUsageInTot TRESUsageOutAve TRESUsageOutMax
TRESUsageOutMaxNode TRESUsageOutMaxTask TRESUsageOutMin TRESUsageOutMinNode TRESUsageOutMinTask TRESUsageOutTot
UID User UserCPU WCKey WCKeyID WorkDir JobComment Associd Reqmem UsedGRES QOSLevel AllocGres Uid ReqGres
"""

KNOWN = {name.lower(): name for name in reversed(_NAMES.split())}
"""Lower-case name -> name as sacct prints it (headers are compared case-insensitively)."""

FREE_TEXT = frozenset(
    {
        "jobname", "submitline", "comment", "admincomment", "systemcomment", "extra", "workdir", "stdin", "stdout",
        "stderr", "constraints", "container", "jobcomment", "reason", "reservation", "wckey", "licenses",
    }
)  # fmt: skip
"""Columns with text chosen by users, which may contain the delimiter or a newline."""

READ_COLUMNS = (
    "JobIDRaw", "JobID", "Cluster", "User", "UID", "Account", "Partition", "QOS", "Priority", "State",
    "ExitCode", "Reason",
    "Submit", "Eligible", "Start", "End", "ElapsedRaw", "Suspended", "TimelimitRaw", "NNodes", "NodeList",
    "AllocCPUS", "ReqCPUS", "NTasks", "ReqMem", "ReqTRES", "AllocTRES", "AllocGRES", "ReqGRES", "TotalCPU", "MaxRSS",
    "TRESUsageInMax", "ConsumedEnergyRaw", "Constraints", "AdminComment", "Comment", "WorkDir", "JobName",
    "SubmitLine",
)  # fmt: skip
"""Columns requested from sacct, in this order: free text last, JobName and SubmitLine at the end."""

USED = frozenset(name.lower() for name in READ_COLUMNS) | {
    "elapsed", "timelimit", "allocnodes", "reqnodes", "ncpus", "usercpu", "systemcpu", "consumedenergy",
}  # fmt: skip
"""All columns that are read, in lower case: ``READ_COLUMNS`` and substitutes for some of them."""


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_NOT_NAME = re.compile(r"[^A-Za-z0-9_%]+")
_WIDTH = re.compile(r"%-?\d+$")
_TABLE = re.compile(r"^\s*JobID\s{2,}|^\s*\S+(\s{2,}\S+)+\s*$", re.IGNORECASE)
_HINT = "make the input with: sacct --parsable2 --allusers --duplicates --format=JobIDRaw,JobID,..."


@dataclass(frozen=True, slots=True)
class Header:
    """The columns and the delimiter of sacct text."""

    names: tuple[str, ...]
    """Lower case, as in ``KNOWN``; the second occurrence of a column has ``#2`` after its name."""
    delimiter: str | None
    """``None`` if there is only one column."""
    trailing: bool
    """Whether every line ends with a delimiter (``sacct --parsable``)."""

    @property
    def delimiters(self) -> int:
        """Number of delimiters in a line without delimiters in its texts."""
        return len(self.names) - 1 + self.trailing

    @property
    def id_column(self) -> int:
        """Index of the column with the job ID."""
        return self.names.index("jobidraw" if "jobidraw" in self.names else "jobid")

    @property
    def text_before_id(self) -> bool:
        """Whether a free-text column precedes the job ID."""
        return not FREE_TEXT.isdisjoint(self.names[: self.id_column])


def parse_header(line: str, *, where: str, delimiter: str | None = None) -> Header:
    """Parse the header ``line``; without ``delimiter``, detect it from the known column names.

    The ``InputError`` raised for anything else suggests what the file is instead.
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
        raise InputError("this is sacct's default table, whose cells are truncated", where=where, hint=_HINT)
    if any(word in KNOWN for word in lowered) and not {"jobid", "jobidraw"} & set(lowered):
        raise InputError("the header has neither JobID nor JobIDRaw", where=where, hint=_HINT)
    if re.match(r"^\d+([_+.]\S*)?[^\w\s]", line):
        raise InputError("the first line is not a header", where=where, hint="run sacct without --noheader")
    raise InputError("this is not sacct output: the first line is not a header of sacct", where=where, hint=_HINT)


def find_header(line: str, delimiter: str | None) -> Header | None:
    """Return ``line`` as a header, or ``None`` unless at least half of the names are known and one is a job ID."""
    if not line or len(line) > 10_000:
        return None
    if delimiter is not None:
        return _header(line, delimiter)
    return next((header for d in _delimiters(line) if (header := _header(line, d)) is not None), None)


def _delimiters(line: str) -> list[str | None]:
    """Return possible delimiters, the most likely first."""
    first = _NAME.match(line)
    if first is None:
        return []
    if first.end() == len(line):
        candidates: list[str | None] = [None]
    else:
        gap = _NOT_NAME.match(line, _width_end(line, first.end()))
        candidates = [gap[0]] if gap is not None else []
    # The delimiter may consist of letters or digits: try each text that follows a known name.
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
        times = sum(previous_name.partition("#")[0] == name for previous_name in unique)
        unique.append(f"{name}#{times + 1}" if times else name)
    return Header(tuple(unique), delimiter if len(unique) > 1 or trailing else None, trailing)
