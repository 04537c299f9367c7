"""Failures in the logs of jobs, slurmd and the kernel: memory that ran out, errors of CUDA and NCCL, tracebacks.

The texts are those of PyTorch, CUDA, JAX, NCCL, vLLM, SGLang, llama.cpp, glibc, Python, the kernel and Slurm. A scan
uses bounded memory and stops at no byte, valid UTF-8 or not.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from slurm_affinode.base.text import one_line


class FailureKind(NamedTuple):
    """The memory that ran out, if one did, and the rank of the failure: of several, one of the lowest is the cause."""

    memory: str | None
    rank: int


KINDS: Mapping[str, FailureKind] = {
    "gpu-out-of-memory": FailureKind("gpu", 0),
    "gpu-memory-at-startup": FailureKind("gpu", 0),
    "no-kv-cache-memory": FailureKind("gpu", 0),
    "kv-cache-too-small": FailureKind("kv-cache", 0),
    "kv-cache-exhausted": FailureKind("kv-cache", 0),
    "job-memory-limit": FailureKind("job", 0),
    "node-out-of-memory": FailureKind("node", 0),
    "host-allocation": FailureKind("host", 0),
    "workspace-too-small": FailureKind("workspace", 0),
    "shared-memory": FailureKind("shared", 0),
    "disk-full": FailureKind("disk", 0),
    "gpu-fault": FailureKind(None, 1),
    "time-limit": FailureKind(None, 1),
    "preempted": FailureKind(None, 1),
    "node-failure": FailureKind(None, 1),
    "canceled": FailureKind(None, 1),
    "exception": FailureKind(None, 2),
    "crash": FailureKind(None, 2),
    "collective": FailureKind(None, 3),
    "worker-ended": FailureKind(None, 3),
    "engine-ended": FailureKind(None, 4),
    "shutdown": FailureKind(None, 4),
    "retraction": FailureKind("kv-cache", 5),
}
"""Kind -> the memory that ran out, and its rank. Of the failures of a job, one of the lowest rank is the cause, and the
others follow from it. ``texts.toml`` has their meanings."""

MOST_KEPT = 16
"""Failures of one kind that are kept of a log: the first ones, and half as many of the last ones."""
LINE_BYTES = 16384
"""A longer line is cut."""
_TRACEBACK_BYTES = 1 << 18
_BLOCK = 1 << 22

TRIGGERS = (
    "Traceback (most", "ut of memory", "OutOfMemory", "OUT_OF_MEMORY", "OOM when", "oom_kill", "oom-kill", "CUDA error",
    "CUDA_ERROR", "HIP error", "cudaError", "NCCL error", "NCCL WARN", "ncclSystemError", "ncclUnhandled", "ncclRemote",
    "Watchdog caught", "EngineDeadError", "EngineCore died", "core initialization failed", "To serve at least one",
    "larger than the maximum number of tokens", "No available memory for", "KV cache size", "Maximum concurrency",
    "Overriding num_gpu_blocks", "non-default args", "ngine process", "Free memory on device", "slurmstepd", "slurmd",
    "exceeded memory limit", "t allocate memory", "ailed to allocate", "AlignedAllocator", "low on memory",
    "ailed to find ", "nable to allocate", "MemoryError", "bad_alloc", "illed", "ed unexpectedly", "Bus error",
    "egmentation fault", "core dumped", "NVRM: Xid", "RESOURCE_EXHAUSTED", "Retract requests",
    "mem-fraction-static", "sigquit", "No space left", "shared memory", "uncorrectable ECC", "*** ",
    "_STATUS_", "Out Of Memory", "[shutdown] ", "is preempted by", "ot enough memory", "access fault by GPU",
    "memory: usage ", "</torch_", "Try to allocate ", "able tokens: ",
)  # fmt: skip
"""One of these is in every line that ``classify`` recognizes, except for the last line of a traceback. The search for
more than 64 texts takes more than twice as long."""

_UNITS = {"b": 1, "bytes": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = r"(\d{1,18}(?:\.\d{0,9})?)\s*(bytes|[KMGT]i?B|B)"


@dataclass(frozen=True, slots=True)
class LogFailure:
    """One line of a log, or one traceback, that tells of a failure. Sizes are bytes; ``None`` is not told."""

    kind: str
    """A key of ``KINDS``."""
    log: str
    """Name of the log."""
    line: int
    """Its line, from 1."""
    text: str
    """The message in one line, without control characters: chosen by the program, untrusted."""
    process: str | None = None
    """As the program names it: ``EngineCore``, ``rank 3``."""
    pid: int | None = None
    job: int | None = None
    """The job that it names."""
    time: datetime | None = None
    """Naive, as written."""
    requested: float | None = None
    free: float | None = None
    total: float | None = None
    used: float | None = None
    """By the process itself."""
    unused: float | None = None
    """Reserved by the allocator of the process and not in use: fragmentation."""
    holders: tuple[tuple[int, float], ...] = ()
    """PID of another process -> its GPU memory."""
    gpu: str | None = None
    """Number or PCI address of the GPU."""
    max_length: int | None = None
    """Maximum length of a request that the KV cache can hold, in tokens."""
    requested_tokens: int | None = None
    """Tokens for which the KV cache had no room."""
    free_tokens: int | None = None
    """Tokens for which it had."""
    times: int = 1
    """How often the same message was logged."""

    @property
    def memory(self) -> str | None:
        """The memory that ran out, as in ``FailureKind``."""
        return KINDS[self.kind].memory

    @property
    def measured(self) -> bool:
        """Whether the message has a size, or names a process that held the memory."""
        return any(figure is not None for figure in (self.requested, self.used, self.requested_tokens)) or bool(
            self.holders
        )

    @property
    def rank(self) -> int:
        """The rank of its kind: a lower one is nearer to the cause."""
        return KINDS[self.kind].rank


@dataclass(frozen=True, slots=True)
class StartupFacts:
    """Memory figures, model and options that an engine logs at its start. ``None``: not logged."""

    kv_tokens: int | None = None
    """Capacity of the KV cache, in tokens."""
    max_length: int | None = None
    """Maximum length of a request, in tokens."""
    concurrency: float | None = None
    """Requests of that length that the KV cache can hold."""
    kv_blocks: int | None = None
    """Blocks of the KV cache that an option sets."""
    kv_blocks_free: int | None = None
    """Blocks for which there is memory, where an option sets another number."""
    model: str | None = None
    """Model on the command line: untrusted."""
    options: tuple[tuple[str, ...], ...] | None = None
    """Options that differ from the defaults, each with its values, as on a command line: untrusted."""


@dataclass(frozen=True, slots=True)
class LogFindings:
    """Failures and startup facts of one log."""

    log: str
    bytes: int
    lines: int
    failures: tuple[LogFailure, ...]
    """In the order of the log; of each kind at most ``MOST_KEPT`` and half as many."""
    dropped: int
    """Failures between the first and the last ones of a kind, which are only counted."""
    startup: StartupFacts
    cut_lines: int = 0
    """Lines longer than ``LINE_BYTES``, of which only the beginning was examined."""


def in_bytes(number: str, unit: str) -> float:
    """Return ``2.00 GiB`` as bytes. Programs write GB for GiB as often as not; both are powers of 1024 here."""
    return float(number) * _UNITS[unit.lower() if unit.lower() == "bytes" else unit[0].lower()]


_GIB = r"(\d{1,12}(?:\.\d{1,9})?)\s*/\s*(\d{1,12}(?:\.\d{1,9})?) GiB"
_ANSI = re.compile(r"\x1b\[[0-9;]{0,32}m")
_PREFIX = re.compile(
    r"""^(?:\[?(?:rank|default)\s?(?P<rank>\d{1,6})\]?:\s?|(?P<task>\d{1,6}):\s|\((?P<name>[\w:.-]{1,64})\s?(?:rank=\d+\s)?pid=(?P<pid>\d{1,10})(?:,\sip=[\w.:]+)?\)\s)+"""
)
_LEVEL = re.compile(
    r"^(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+)?"
    r"(?:\[?\d{2,4}-\d\d(?:-\d\d)?[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:\s?TP\d+)?\]?\s*)?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+)?(?:\[[\w./-]{1,80}:\d{1,6}\]\s?)?"
)
_LEVEL_ALONE = re.compile(r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):\s")
"""Begins lines of uvicorn."""
_GROUP = re.compile(r" +\| ?")
"""Margin of the exceptions in a group."""
_TIME = re.compile(r"\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)")
_JOB = re.compile(r"(?:StepId=|JobId=|/job_|job |JOB |STEP |step )(\d{1,10})\b")


def _sizes(text: str, **patterns: str) -> dict[str, float]:
    sizes = {}
    for name, pattern in patterns.items():
        match = re.search(pattern, text, re.IGNORECASE)
        if match is not None:
            sizes[name] = in_bytes(match[1], match[2])
    return sizes


def _torch(text: str) -> dict[str, object]:
    # "Process N has X in use" names the others; "this process has X in use" is the one that failed.
    holders = tuple(
        (int(pid), in_bytes(number, unit))
        for pid, number, unit in re.findall(rf"Process (\d{{1,10}}) has {_SIZE} memory in use", text)
    )
    gpu = re.search(r"GPU (\d{1,4})\b", text)
    sizes = _sizes(
        text, allocated=rf"Of the allocated memory {_SIZE}", idle=rf"(?:and|\.) {_SIZE} is reserved by PyTorch but"
    )
    used = {}
    if "this process has" not in text and sizes.get("allocated"):
        # In a container the PIDs of the driver are not those of the processes: the process itself is among the others.
        least = sizes["allocated"] + sizes.get("idle", 0.0)
        may_be_it = [holder for holder in holders if holder[1] >= least]
        holders = tuple(holder for holder in holders if holder[1] < least)
        used = {"used": may_be_it[0][1]} if len(may_be_it) == 1 else {}
    return {
        **used,
        **_sizes(
            text,
            requested=rf"(?:[Tt]r(?:ied|ying) to allocate|allocating|request for|\w buffer of size) {_SIZE}",
            total=rf"(?:total capacity of {_SIZE})",
            free=rf"(?:of which {_SIZE} is free)",
            used=rf"this process has {_SIZE}",
            unused=rf"(?:and|\.) {_SIZE} is reserved by PyTorch but unallocated",
        ),
        **_sizes(text, **({"total": rf"{_SIZE} total capacity"} if "total capacity of" not in text else {})),
        **_sizes(text, **({"free": rf"{_SIZE} free"} if "of which" not in text else {})),
        **({"holders": holders} if holders else {}),
        **({"gpu": gpu[1]} if gpu else {}),
    }


def _startup(text: str) -> dict[str, object]:
    match = re.search(rf"\({_GIB}\)", text)
    utilization = re.search(r"utilization \(([\d.]{1,12}), ([\d.]{1,12}) GiB\)", text)
    return {
        **({"free": float(match[1]) * 2**30, "total": float(match[2]) * 2**30} if match else {}),
        **({"requested": float(utilization[2]) * 2**30} if utilization else {}),
    }


def _kv_cache(text: str) -> dict[str, object]:
    length = re.search(r"estimated maximum model length is (\d{1,12})", text) or re.search(
        r"stored in (?:the )?KV cache \((\d{1,12})\)", text
    )
    sizes = _sizes(text, requested=rf"\({_SIZE} KV cache is needed", free=rf"available KV cache memory \({_SIZE}\)")
    # Rounded to two decimals of a GiB at most: 0.0 is a small amount, not none.
    positive: dict[str, object] = {name: value for name, value in sizes.items() if value > 0}
    return {**positive, **({"max_length": int(length[1])} if length else {})}


def _workspace(text: str) -> dict[str, object]:
    match = re.search(r"with size (\d{1,15}).{0,40}only (\d{1,15}) bytes available", text)
    return {"requested": float(match[1]), "free": float(match[2])} if match else {}


def _host(text: str) -> dict[str, object]:
    return dict(_sizes(text, requested=rf"(?:tried to allocate|Unable to allocate|allocating) {_SIZE}"))


def _kernel(text: str) -> dict[str, object]:
    killed = re.search(r"Kill(?:ed)? process (?P<pid>\d{1,10}) \((?P<name>.{1,64}?)\)", text) or re.search(
        r",task=(?P<name>.{1,64}),pid=(?P<pid>\d{1,10}),uid=", text
    )
    used = [int(size) * 1024 for size in re.findall(r"(?:anon|file|shmem)-rss:(\d{1,15})kB", text)]
    return {
        **({"pid": int(killed["pid"]), "process": one_line(killed["name"], 64)} if killed else {}),
        **({"used": float(sum(used))} if used else {}),
    }


def _exceeded(text: str) -> dict[str, object]:
    match = re.search(r"\((\d{1,15}) > (\d{1,15})\)", text)
    # slurmd writes KiB in this message.
    return {"used": float(match[1]) * 1024, "total": float(match[2]) * 1024} if match else {}


def _no_facts(_text: str) -> dict[str, object]:
    return {}


def _xid(text: str) -> dict[str, object]:
    match = re.search(r"Xid \((?:PCI:)?([\w:.]{1,20})\)", text)
    return {"gpu": match[1]} if match else {}


_I = re.IGNORECASE
_RULES: tuple[tuple[re.Pattern[str], str, Callable[[str], dict[str, object]]], ...] = (
    (re.compile(r"Memory cgroup out of memory: Kill|oom-kill:constraint=CONSTRAINT_MEMCG"),
     "job-memory-limit", _kernel),
    (re.compile(r"\bOut of memory: Kill(?:ed)? process|oom-kill:constraint="), "node-out-of-memory", _kernel),
    (re.compile(r"Detected \d{1,9} oom[_-]kill event"), "job-memory-limit", _no_facts),
    (re.compile(r"exceeded (?:job )?memory limit", _I), "job-memory-limit", _exceeded),
    (re.compile(r"killed as a result of limit of /|srun: error: .*: Out Of Memory"), "job-memory-limit", _no_facts),
    (re.compile(r"\bKilled process \d{1,10} \(.*total-vm:|due to the node running low on memory|"
                r"killed due to memory pressure \(OOM\)"),
     "node-out-of-memory", _kernel),
    (re.compile(r"To serve at least one request|larger than the maximum number of tokens that can be stored in"),
     "kv-cache-too-small", _kv_cache),
    (re.compile(r"No available memory for the cache blocks|Not enough memory\. Please try to increase --mem-fraction|"
                r"Not enough memory to handle \d{1,9} prefill tokens|failed to allocate buffer for kv cache"),
     "no-kv-cache-memory", _no_facts),
    (re.compile(r"Buffer overflow when allocating memory for \w{1,64} .*in AlignedAllocator"),
     "workspace-too-small", _workspace),
    (re.compile(r"out of memory\. Try to lower your batch size|"
                r"failed to find (?:free space in the KV cache|a memory slot for batch)", _I),
     "kv-cache-exhausted", _no_facts),
    (re.compile(r"Free memory on device .*less than desired"), "gpu-memory-at-startup", _startup),
    (re.compile(
        r"(?:CUDA|HIP|XPU|MPS)(?:\s[Ee]rror:|\sbackend)? out of memory|[Ff]ailed to allocate request for |"
        r"failed to allocate (?:CUDA|ROCm|HIP|Vulkan|SYCL|Metal)\d{0,3} buffer|CUDA_ERROR_OUT_OF_MEMORY|"
        r"cudaErrorMemoryAllocation|"
        r"cudaMalloc failed: out of memory|(?:torch|cupy)[\w.]*\.OutOfMemoryError|_STATUS_ALLOC_FAILED|"
        r"OOM when allocating tensor|CUDA runtime error in .{1,200}: out of memory|Cuda failure .{0,9}'out of memory'"
    ), "gpu-out-of-memory", _torch),
    (re.compile(r"RESOURCE_EXHAUSTED:.*out of memory", _I), "gpu-out-of-memory", _torch),
    (re.compile(r"unable to (?:allocate|open) shared memory|(?:out of|insufficient) shared memory|"
                r"shared memory \(shm\)|unable to write to file </torch_|No space left on device.{1,9}/dev/shm/|"
                r"NCCL WARN .*(?:posix_fallocate|/dev/shm/|shmutils)|/dev/shm/\S{1,200}.{1,40}No space left on device|"
                r"posix_fallocate failed ?: No space left on device", _I),
     "shared-memory", _no_facts),
    (re.compile(r"\bMemoryError\b|CPUAllocator: not enough memory|"
                r"Unable to allocate .{1,40} for an array|can't allocate memory|Cannot allocate memory|"
                r"std::bad_alloc|java\.lang\.OutOfMemoryError|\bfailed to allocate .{0,60}buffer", _I),
     "host-allocation", _host),
    (re.compile(r"No space left on device"), "disk-full", _no_facts),
    (re.compile(r"NVRM: Xid"), "gpu-fault", _xid),
    (re.compile(
        r"(?:CUDA|HIP) error: (?!out of memory)|CUDA_ERROR_(?!OUT_OF)[A-Z_]{3,}|uncorrectable ECC|"
        r"cudaError(?!MemoryAll)[A-Z]\w+|\bCU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_(?!SUCCESS)|Memory access fault by GPU"
    ), "gpu-fault", _no_facts),
    (re.compile(r"\*\*\* (?:JOB|STEP) .*DUE TO TIME LIMIT"), "time-limit", _no_facts),
    (re.compile(r"\*\*\* (?:JOB|STEP) .*DUE TO PREEMPTION"), "preempted", _no_facts),
    (re.compile(r"\*\*\* (?:JOB|STEP) .*DUE TO (?:NODE|SLURMD)"), "node-failure", _no_facts),
    (re.compile(r"\*\*\* (?:JOB|STEP) .*CANCELLED"), "canceled", _no_facts),
    (re.compile(r"Watchdog caught collective|NCCL error|NCCL WARN .*(?:error|fail|timeout|timed out|no route|refused)|"
                r"nccl(?:System|UnhandledCuda|Remote|Internal)Error", _I),
     "collective", _no_facts),
    (re.compile(r"EngineDeadError|EngineCore died|core initialization failed|engine process .*died", _I),
     "engine-ended", _no_facts),
    (re.compile(r"worker.* (?:is killed by signal|exited unexpectedly|died unexpectedly)|"
                r"Received sigquit from a child", _I),
     "worker-ended", _no_facts),
    (re.compile(r"\[shutdown\] (?:API server: shutdown triggered|EngineCore: trigger received signal)"),
     "shutdown", _no_facts),
    (re.compile(r"Retract requests|is preempted by PreemptionMode"), "retraction", _no_facts),
    (re.compile(
        r"\bSegmentation fault\b|\bBus error\b|\(core dumped\)|"
        r"^(?:\S{1,200}: line \d{1,9}: +\d{1,10} |srun: error: \S{1,200}: tasks? [\d,-]{1,200}: )?Killed\b"
    ), "crash", _no_facts),
)  # fmt: skip
_KV_SIZE = re.compile(r"KV cache size: ([\d,]{1,15}) tokens")
_BLOCKS = re.compile(r"Overriding num_gpu_blocks=(\d{1,12}) with num_gpu_blocks_override=(\d{1,12})\b")
_ARGUMENTS = re.compile(r"non-default args: (\{.{0,8192}\})\s*$")
_NO_OPTIONS = frozenset({"model", "model_tag", "api_key", "hf_token"})
"""Arguments that are no options, or secrets."""
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]{1,15}) tokens per request: ([\d.]{1,12})x")
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]{0,200}?)(?::\s(.*))?$")
_HEADER = "Traceback (most recent call last)"
_FRAMES = (" ", "\t", "|", "+", "│", "╭", "╰")
"""Begin the lines of a traceback that are not its exception; some programs draw a frame around them."""
_KERNEL = ("job-memory-limit", "node-out-of-memory")
_LIMIT = re.compile(r"memory: usage \d{1,18}kB, limit (\d{1,18})kB")
_TOKENS = re.compile(r"^Try to allocate (\d{1,12}) tokens|^A\w{7}e tokens: (\d{1,12})")
"""Logged by SGLang after a batch did not fit; the second word has two spellings."""
_MOST_REPORT_LINES = 5000
"""Lines of the kernel's report about memory that ran out, at most; it lists all processes."""
_MOST_OPEN = 64
"""Tracebacks of different processes that are followed at the same time."""


def _arguments(text: str) -> tuple[str | None, tuple[tuple[str, ...], ...]] | None:
    """Return model and options from vLLM's arguments, a Python literal; ``None`` if it has values of other types."""
    try:
        arguments = ast.literal_eval(text)
        named = {str(name): value for name, value in arguments.items() if value is not None}
        options = tuple(
            _option(f"--{name.replace('_', '-')}", value)
            for name, value in named.items()
            if name not in _NO_OPTIONS and re.fullmatch(r"[a-z][a-z0-9_]{0,64}", name)
        )
    except (ValueError, SyntaxError, TypeError, AttributeError, MemoryError, RecursionError):
        return None
    model = named.get("model") or named.get("model_tag")
    return (model if isinstance(model, str) else None), options


def _option(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (name if value else f"--no-{name[2:]}",)
    if isinstance(value, dict):
        return name, json.dumps(value)
    values = value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(element, str | int | float) for element in values):
        raise TypeError(f"{name} has values of other types")
    return (name, *map(str, values))


def classify(text: str) -> tuple[str, dict[str, object]] | None:
    """Return the kind of the failure that ``text``, a line without its prefix, tells of, and its figures."""
    for pattern, kind, figures in _RULES:
        if pattern.search(text):
            return kind, figures(text)
    return None


class LogScanner:
    """Finds the failures in one log, which is fed in blocks of bytes. ``log``: its name, for the findings."""

    def __init__(self, log: str) -> None:
        self._log = log
        self._rest = b""
        self._plain = np.empty(0, np.uint8)
        self._bytes = 0
        self._lines = 0
        self._cut = 0
        self._dropped = 0
        self._first: dict[str, list[LogFailure]] = {}
        self._last: dict[str, list[LogFailure]] = {}
        self._startup = StartupFacts()
        self._limit: tuple[int, float] | None = None
        """Line and size of the last memory limit that the kernel reported."""
        self._noted: list[Callable[[], None]] = []
        """Notes on the lines of the last traceback, to be called in their order."""

    def feed(self, block: bytes) -> None:
        """Examine the next bytes of the log."""
        self._bytes += len(block)
        # Without NUL, ASCII text in UTF-16 or UTF-32 is that text; files with a hole have long runs of it.
        block = block.replace(b"\0", b"")
        data = self._rest + block if self._rest else block
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) < _BLOCK:
            self._rest = data
            return
        if end == 0:
            end = len(data)
        self._rest = self._examine(data, end, final=False)

    def findings(self) -> LogFindings:
        """Examine the last line, which may lack its end, and return everything found."""
        if self._rest:
            self._examine(self._rest, len(self._rest), final=True)
            self._lines += not self._rest.endswith(b"\n")
            self._rest = b""
        failures = [failure for kind in self._first for failure in (*self._first[kind], *self._last.get(kind, ()))]
        ordered = tuple(sorted(failures, key=lambda failure: failure.line))
        return LogFindings(self._log, self._bytes, self._lines, ordered, self._dropped, self._startup, self._cut)

    def _examine(self, data: bytes, end: int, *, final: bool) -> bytes:
        """Examine whole lines and return what the next block has to begin with."""
        position = counted = 0
        every = np.frombuffer(data, np.uint8, count=end)
        if len(self._plain) < end:  # kept, as new memory takes longer than the search
            self._plain = np.empty(end, np.uint8)
        hits = _ascii(every, self._plain).str.find_many(list(TRIGGERS), leftmost=True)[0].to_list()
        for hit in hits:
            if hit < position:
                continue
            # A line begins at ``at``: nothing before it is searched, as there may be many lines that end in CR.
            newline = max(data.rfind(b"\n", position, hit), position - 1)
            start = max(newline, data.rfind(b"\r", newline + 1, hit)) + 1
            self._lines += int(np.count_nonzero(every[counted:start] == _NEWLINE))
            counted = start
            if data.startswith(_HEADER.encode(), hit):
                after = self._tracebacks(data, start, end, hits)
                if after is None and not final:
                    return data[start:]
                position = end if after is None else after
                for note in self._noted:
                    note()
                continue
            stop = _end_of_line(data, start, end)
            self._line(_line_of(data, start, stop), self._lines + 1)
            position = stop + 1
        self._lines += int(np.count_nonzero(every[counted:end] == _NEWLINE))
        return data[end:]

    def _line(self, line: _Line, number: int) -> None:
        """Note what a line says. ``number``: that of the line, from 1."""
        self._cut += line.cut
        self._note_startup(line.text)
        self._note_figures(line.text, number)
        text = line.text.strip()
        failure = classify(text)
        if failure is not None:
            self._add(failure[0], text, {**line.facts, **failure[1]}, number)

    def _tracebacks(self, data: bytes, start: int, end: int, hits: Sequence[int]) -> int | None:
        """Collect the exceptions of a traceback and of those that other processes log before it ends, and other lines.

        ``hits``: positions of triggers. Returns the position behind them, or ``None`` if the data ends before.
        """
        begun: dict[object, _Traceback] = {}
        self._noted = []
        position, limit, number = start, min(end, start + _TRACEBACK_BYTES), self._lines + 1
        while position < limit:
            stop = _end_of_line(data, position, end)
            line = _line_of(data, position, stop)
            who = line.facts.get("pid"), line.facts.get("process")
            traceback = begun.get(who)
            text = _GROUP.sub("", line.text, count=1)
            if _HEADER in text:
                if traceback is not None or len(begun) < _MOST_OPEN:
                    begun[who] = _Traceback(line.facts, number)
            elif traceback is not None and (not text.strip() or text.startswith(_FRAMES)):
                traceback.leveled = line.leveled if traceback.leveled is None else traceback.leveled
            elif traceback is not None and traceback.leveled in (None, line.leveled):
                self._noted.append(functools.partial(self._add_exception, text.strip(), begun.pop(who)))
            elif (near := bisect.bisect_left(hits, position)) < len(hits) and hits[near] < stop:
                self._noted.append(functools.partial(self._line, line, number))
            number += data.count(b"\n", position, stop + 1)
            position = stop + 1
            if not begun:
                return position
        return None if position >= end and end - start < _TRACEBACK_BYTES else position

    def _add_exception(self, text: str, traceback: _Traceback) -> None:
        failure = classify(text)
        if failure is not None:
            self._add(failure[0], text, {**traceback.facts, **failure[1]}, traceback.number)
        elif (match := _EXCEPTION.match(text)) is not None and match[1] not in ("KeyboardInterrupt", "SystemExit"):
            self._add("exception", text, traceback.facts, traceback.number)

    def _note_figures(self, text: str, number: int) -> None:
        """Note figures that a program logs on a line of their own, before or after the failure."""
        if (limit := _LIMIT.search(text)) is not None:
            self._limit = number, int(limit[1]) * 1024.0
        if (match := _TOKENS.search(text)) is not None:
            field = "requested_tokens" if match[1] else "free_tokens"
            for group in (self._last.get("kv-cache-exhausted"), self._first.get("kv-cache-exhausted")):
                if group and getattr(group[-1], field) is None:
                    group[-1] = replace(group[-1], **{field: int(match[1] or match[2])})  # type: ignore[arg-type]
                    return

    def _note_startup(self, text: str) -> None:
        if (match := _ARGUMENTS.search(text)) is not None and (startup := _arguments(match[1])) is not None:
            self._startup = replace(self._startup, model=startup[0], options=startup[1])
        if (match := _KV_SIZE.search(text)) is not None:
            self._startup = replace(self._startup, kv_tokens=int(match[1].replace(",", "")))
        if (match := _BLOCKS.search(text)) is not None:
            self._startup = replace(self._startup, kv_blocks_free=int(match[1]), kv_blocks=int(match[2]))
        if (match := _CONCURRENCY.search(text)) is not None and match[2].count(".") <= 1 and match[2] != ".":
            length, requests = int(match[1].replace(",", "")), float(match[2])
            self._startup = replace(self._startup, max_length=length, concurrency=requests)

    def _add(self, kind: str, text: str, figures: Mapping[str, object], number: int) -> None:
        job = _JOB.search(text)
        values = dict(figures)
        if job is not None and "job" not in values:
            values["job"] = int(job[1])
        failure = LogFailure(kind, self._log, number, one_line(text, 600), **values)  # type: ignore[arg-type]
        if kind in _KERNEL and self._completes(failure):
            return
        first, last = self._first.setdefault(kind, []), self._last.setdefault(kind, [])
        for group in (last, first):
            for index, earlier in enumerate(group):
                if earlier.text == failure.text:
                    group[index] = replace(earlier, times=earlier.times + 1)
                    return
        if len(first) < MOST_KEPT:
            first.append(failure)
            return
        last.append(failure)
        if len(last) > MOST_KEPT // 2:
            del last[0]
            self._dropped += 1

    def _completes(self, failure: LogFailure) -> bool:
        """Add what the kernel says about a process to what it said about it before; return whether it did."""
        for kind in _KERNEL:
            for group in (self._last.get(kind), self._first.get(kind)):
                if not group:
                    continue
                before = group[-1]
                same = before.pid == failure.pid if before.pid else "killed as a result of limit" in before.text
                near = failure.line - before.line <= _MOST_REPORT_LINES
                if failure.pid is None or not same or not near or before.used is not None:
                    continue
                total = self._limit[1] if self._limit and failure.line - self._limit[0] <= _MOST_REPORT_LINES else None
                text = failure.text if failure.used is not None else before.text
                group[-1] = replace(
                    before, text=text, pid=failure.pid, process=failure.process or before.process, used=failure.used,
                    total=before.total or (total if kind == "job-memory-limit" else None),
                )  # fmt: skip
                return True
        return False


class _Line(NamedTuple):
    """A line without its prefix."""

    text: str
    facts: dict[str, object]
    """The process, PID and time that its prefix names."""
    leveled: bool
    """Whether a logger wrote it: its prefix names a level."""
    cut: bool = False


@dataclass(slots=True)
class _Traceback:
    """A traceback whose exception has not been seen yet."""

    facts: dict[str, object]
    number: int
    """Of its first line, from 1."""
    leveled: bool | None = None
    """Whether a logger wrote its lines; ``None``: there was none yet."""


_NEWLINE = ord("\n")
_DELETE = 0x7F


def _ascii(data: npt.NDArray[np.uint8], into: npt.NDArray[np.uint8]) -> pl.Series:
    """Return one text with as many bytes, a view of ``into``. Bytes above 0x7F, of any encoding, become DEL."""
    plain = into[: len(data)]
    np.minimum(data, np.uint8(_DELETE), out=plain)
    ends = pa.py_buffer(np.array([0, len(data)], np.int64))
    return pl.Series(pa.Array.from_buffers(pa.large_string(), 1, [None, ends, pa.py_buffer(plain)]))


def _end_of_line(data: bytes, start: int, end: int) -> int:
    near = min(end, start + LINE_BYTES)
    newline = data.find(b"\n", start, near)
    if newline < 0 and data.find(b"\r", start, near) < 0:
        newline = data.find(b"\n", near, end)
    stop = end if newline < 0 else newline
    # A progress bar writes carriage returns only: what follows one is a line of its own.
    bar = data.find(b"\r", start, stop)
    return bar if 0 <= bar < stop - 1 else stop


def _line_of(data: bytes, start: int, stop: int) -> _Line:
    line = _stripped(data[start : min(stop, start + LINE_BYTES)])
    return line._replace(cut=stop - start > LINE_BYTES)


def _stripped(line: bytes) -> _Line:
    text = _ANSI.sub("", line.decode("utf-8", "replace").rstrip("\r\n "))
    facts: dict[str, object] = {}
    if (match := _TIME.match(text)) is not None:
        with contextlib.suppress(ValueError):
            facts["time"] = datetime.fromisoformat(match[1])
    if (match := _PREFIX.match(text)) is not None:
        if match["pid"] is not None:
            facts["pid"] = int(match["pid"])
            facts["process"] = match["name"]
        elif match["rank"] is not None:
            facts["process"] = f"rank {int(match['rank'])}"
        elif match["task"] is not None:
            facts["process"] = f"task {int(match['task'])}"
        text = text[match.end() :]
    message = _LEVEL.sub("", text, count=1)
    return _Line(message, facts, len(message) < len(text) or _LEVEL_ALONE.match(text) is not None)


def scan(blocks: Iterator[bytes], log: str) -> LogFindings:
    """Return the findings of a whole log, given in blocks."""
    scanner = LogScanner(log)
    for block in blocks:
        scanner.feed(block)
    return scanner.findings()
