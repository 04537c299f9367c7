"""The memory limits of a job's cgroups, raised while its GPU memory is in host memory.

slurmd limits the cgroups of a job to its ``--mem`` (``ConstrainRAMSpace``). Limits that it set later
(``scontrol update --mem``) are kept. A raised limit is recorded in a file before it is raised, with the inode of its
cgroup, and is lowered when the suspension of the job is no longer in the journal: by the agent that raised it, or by
the next one. It is not raised again before that.

The kernel does not lower a limit of version 1 below the memory in use (EBUSY). In version 2 it ends processes of the
job. For a grace period the limit is therefore not lowered before the memory of the job fits. After that, the job has
exceeded its memory, and the kernel ends processes as it does at Slurm's own limit: in version 2 by lowering the limit;
in version 1 by lowering it to the memory in use, and by using more (``memory_pressure``).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slurm_affinode.base import json_values, kernel_text
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.files import write_text
from slurm_affinode.base.pidfd import PROC, Id, Process
from slurm_affinode.base.text import size
from slurm_affinode.checkpoint.inspection import NO_LIMIT, SpareMemory, reclaimable
from slurm_affinode.gpu.jobs import JobFinder, cgroup_of_job
from slurm_affinode.suspension.job import memory_pressure
from slurm_affinode.suspension.job.cgroup import Cgroup

LOG = logging.getLogger("slurm_affinode.agent")
_VERSION = 1
_STEP = 1 << 20
"""Limits are raised to multiples of this, in bytes; the kernel rounds to pages."""
_GRACE_S = 60.0
"""After this time a job that still uses more than its limit has exceeded its memory."""
_KILLS_AT_ONCE = 5
"""Processes of a job that the kernel ends in one call of ``tend``."""
_V1 = (
    ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Limits and what they limit, in the order in which they are raised: memory and swap together are never less."""
_V2 = (("memory.max", "memory.current"), ("memory.high", "memory.current"))
_USAGE = dict((*_V1, *_V2))
_MEMORY_LIMITS = ("memory.limit_in_bytes", "memory.max")
"""Limits of memory without swap, beyond which the kernel ends processes."""


class MemoryLimitError(AffinodeError):
    """The limits cannot be raised; nothing was changed."""


@dataclass(frozen=True, slots=True)
class RaisedLimit:
    """A raised limit of one cgroup."""

    cgroup: str
    """Its directory."""
    device: int
    inode: int
    name: str
    """Its file."""
    before: int
    """Slurm's value in bytes."""
    written: tuple[int, ...]
    """Values that the agent may have written last. Any other value was set by Slurm since."""


@dataclass(frozen=True, slots=True)
class _RaisedLimits:
    """The raised limits of a job."""

    boot: str
    limits: tuple[RaisedLimit, ...]
    over_since: float | None = None
    """When the job was first found to use too much for Slurm's limits, in monotonic seconds."""


@dataclass(frozen=True, slots=True)
class LimitRoom:
    """Memory left for a job, in bytes, including reclaimable memory; ``None``: no limit."""

    in_job: int
    """Below the limits of its own cgroups."""
    above: int | None
    """Below the limits of the cgroups above them, which the agent does not change."""


@dataclass(frozen=True, slots=True)
class AllocatedMemory:
    """Memory of the cgroups of all jobs on this node, in bytes."""

    limits: Mapping[tuple[int, int], int]
    """Device and inode of the cgroup of each job -> the limit that Slurm has set."""
    unused: int
    """Sum of the memory that all jobs but one may still use."""
    raised_bytes: int = 0
    """The part of ``unused`` above Slurm's limits."""

    def starting(self, allocated: int, earlier: AllocatedMemory, share: float = 1.0) -> int:
        """Return the memory of jobs that have no cgroup yet. ``allocated``: by Slurm, on this node.

        ``earlier``: as it was before Slurm was queried. Only cgroups that existed before and after the query certainly
        belong to jobs in its answer. ``share``: the limit of a job per allocated byte.
        """
        known_limits = sum(limit for cgroup, limit in self.limits.items() if cgroup in earlier.limits)
        return max(0, allocated - math.floor(known_limits / max(1.0, share)))


@dataclass(frozen=True, slots=True)
class ExceededLimit:
    """A job that has kept more memory than Slurm permits, after its limit was raised and a grace period has passed."""

    job_id: int
    used: int
    """Bytes, without reclaimable memory."""
    limit: int
    """Slurm's, in bytes."""
    rounds: int
    """Number of calls of ``tend`` in which the kernel has ended processes without success."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """A limit of a cgroup at this moment."""

    name: str
    value: int
    free_bytes: int


class MemoryLimits:
    """The memory limits of the jobs on this node. Thread-safe."""

    def __init__(
        self, directory: Path, *, proc: Path = PROC, cgroups: Path = Path("/sys/fs/cgroup"),
        finder: JobFinder | None = None, clock: Callable[[], float] = time.monotonic,
        press: Callable[[Cgroup], None] = memory_pressure.press,
    ) -> None:  # fmt: skip
        """``directory``: for the records of raised limits, on the node's own disk; ``clock``: monotonic seconds.

        ``press``: use memory in a cgroup that is at its limit, so that the kernel ends a process.
        """
        self._directory, self._proc, self._cgroups, self._clock = directory, proc, cgroups, clock
        self._press = press
        self._finder = finder or JobFinder(proc, cgroups=cgroups)
        self._lock = threading.Lock()
        """Guards the records."""
        self._turn = 0
        """Number of calls of ``make_room``."""
        self._rounds: dict[int, int] = {}
        """Job that has exceeded its memory -> see ``ExceededLimit.rounds``."""

    # --- reading

    def room(self, job_id: int, init: Id) -> LimitRoom | None:
        """Return the memory left for the job of a shepherd; ``None``: Slurm does not limit its cgroups."""
        with contextlib.suppress(OSError), self._opened(job_id, init) as place:
            room = _smallest_rest(place.job_groups)
            return None if room is None else LimitRoom(room, _smallest_rest(place.above))
        return None

    def used(self, job_id: int, init: Id) -> int | None:
        """Return the memory that the cgroup of a job uses, without reclaimable memory; ``None``: unknown."""
        with contextlib.suppress(OSError), self._opened(job_id, init) as place:
            for name in (name for name in _MEMORY_LIMITS if place.job_groups and place.job_groups[0].has(name)):
                return _used(place.job_groups[0], name)
        return None

    def allocated(self, job_id: int, init: Id) -> AllocatedMemory:
        """Return the memory allocated on this node; ``unused`` without that of the job of this shepherd.

        Raises ``OSError``.
        """
        with self._opened(job_id, init) as place:
            return self._allocated(place)

    def _allocated(self, place: _Place) -> AllocatedMemory:
        known_limits = {}
        for record in self._records().values():
            known_limits.update({(limit.device, limit.inode, limit.name): limit for limit in record.limits})
        limits: dict[tuple[int, int], int] = {}
        unused = raised = 0
        own_group = place.job_groups[0] if place.job_groups else None
        for group in place.jobs():
            with contextlib.suppress(OSError), group:
                limit = next((limit for limit in _limits(group) if limit.name in _MEMORY_LIMITS), None)
                if limit is None:
                    continue  # not limited yet
                prior = known_limits.get((*_identity(group), limit.name))
                slurms = limit.value if prior is None or limit.value not in prior.written else prior.before
                limits[_identity(group)] = slurms
                if own_group is None or _identity(group) != _identity(own_group):
                    free = max(0, limit.free_bytes)
                    unused += free
                    raised += min(free, max(0, limit.value - slurms))
        return AllocatedMemory(limits, unused, raised)

    def promised(self) -> int:
        """Return the memory that jobs may still use above Slurm's limits. Raises ``OSError`` if that is unknown."""
        boot, total = self._boot(), 0
        for record in self._records().values():
            limits = record.limits if record.boot == boot else ()
            total += max((self._promised(limit) for limit in limits if limit.name in _MEMORY_LIMITS), default=0)
        return total

    def _promised(self, limit: RaisedLimit) -> int:
        with contextlib.suppress(OSError), self._group(limit) as group:
            value, used = _number(group, limit.name), _used(group, limit.name)
            if value is not None and used is not None and value in limit.written:
                return max(0, min(value - used, value - limit.before))
        return 0

    def raised_bytes(self, job_id: int) -> int | None:
        """Return the bytes by which the limits of a job are raised; 0 if they are not, ``None`` if that is unknown."""
        try:
            record = self._records((job_id,)).get(job_id)
        except OSError:
            return None
        return 0 if record is None else max((max(limit.written) - limit.before for limit in record.limits), default=0)

    # --- raising

    def make_room(
        self, job_id: int, init: Id, needed: int, spare: Callable[[AllocatedMemory], SpareMemory | None]
    ) -> int:
        """Raise the limits of a job so that it can use ``needed`` more bytes; return by how much, 0 if not necessary.

        They are raised by all of ``needed`` if ``spare`` permits, so that other processes of the job keep what they
        have left. ``spare``: return the memory that the node can spare; ``None``: unknown. Raises ``MemoryLimitError``,
        also if the limits are still raised and cannot be lowered now.
        """
        with self._lock:
            self._turn += 1
            if not self._lower(job_id):
                raise MemoryLimitError(f"it is still raised for an earlier suspension: {STILL_RAISED}")
            try:
                with self._opened(job_id, init) as place:
                    left_in_job, above = _smallest_rest(place.job_groups), _smallest_rest(place.above)
                    if left_in_job is None or left_in_job >= needed:
                        return 0
                    # Under the lock: limits that are being raised for other jobs count as allocated to them.
                    allocated = self._allocated(place)
                    if above is not None and above - allocated.raised_bytes < needed:
                        free = max(0, above - allocated.raised_bytes)
                        raise MemoryLimitError(f"a cgroup above those of the job leaves {size(free)}")
                    memory = spare(allocated)
                    if memory is None or memory.available < needed:
                        raise MemoryLimitError(of_spare(memory))
                    return self._raise(job_id, place, needed, memory.available)
            except OSError as error:
                self._lower(job_id)
                raise MemoryLimitError(f"its memory limit cannot be raised: {error.strerror or error}") from error

    def _raise(self, job_id: int, place: _Place, needed: int, spare: int) -> int:
        """Raise limits that leave less than ``needed``; return by how many bytes at most. Raises ``OSError``."""
        todo = []
        for group in place.job_groups:
            limits, (device, inode) = _limits(group), _identity(group)
            free = min((limit.free_bytes for limit in limits), default=needed)
            more = 0 if free >= needed else min(needed + free, spare) - free
            for raised in limits if more else ():
                value = _rounded(raised.value + more)
                todo.append(
                    (group, RaisedLimit(str(group), device, inode, raised.name, raised.value, (raised.value, value)))
                )
        self._write(job_id, _RaisedLimits(self._boot(), tuple(limit for _, limit in todo)))
        for group, limit in todo:
            group.write(limit.name, str(limit.written[-1]))
        return max((limit.written[-1] - limit.before for _, limit in todo), default=0)

    # --- lowering

    def lower(self, job_id: int) -> bool:
        """Restore the limits of a job; ``False``: it still uses more memory, and ``tend`` tries again."""
        with self._lock:
            return self._lower(job_id)

    def tend(self, suspended: Callable[[], Collection[int]], exceeded: Callable[[ExceededLimit], None]) -> None:
        """Lower limits that were left raised, and have the kernel end processes of jobs that have exceeded theirs.

        ``suspended``: return the jobs with a suspension in the journal. ``exceeded`` is called before processes of a
        job are ended.
        """
        turn = self._turn
        try:
            raised = self._records()
        except OSError as error:
            LOG.warning("%s: memory limits are not lowered yet: %s", self._directory, error)
            return
        if not raised:
            return
        jobs = suspended()
        for job_id in sorted(raised.keys() - set(jobs)):
            with self._lock:
                # Otherwise a suspension may have begun after the journal was read; this is repeated soon.
                if self._turn != turn or self._lower(job_id):
                    continue
                excess = self._excess(job_id)
            if excess is not None:
                exceeded(excess)
                self._end_excess(job_id)

    def _end_excess(self, job_id: int) -> None:
        """Have the kernel end processes until the memory of the job fits."""
        self._rounds[job_id] = self._rounds.get(job_id, 0) + 1
        for _ in range(_KILLS_AT_ONCE):
            with self._lock:
                if self._lower(job_id, kill=True):
                    return
                exceeded = self._exceeded(job_id)
            if not exceeded:
                return
            with contextlib.suppress(OSError), self._group(exceeded[0]) as group:
                self._press(group)  # without the lock: it takes some time

    def _excess(self, job_id: int) -> ExceededLimit | None:
        """Return by how much a job has exceeded its memory; ``None``: it has not."""
        limits = self._exceeded(job_id)
        used = max((used for used in map(self._used, limits) if used is not None), default=None)
        if used is None:
            return None
        return ExceededLimit(job_id, used, min(limit.before for limit in limits), self._rounds.get(job_id, 0))

    def _exceeded(self, job_id: int) -> list[RaisedLimit]:
        """Return the limits of Slurm's that a job exceeds after the grace period, of the innermost cgroups first."""
        try:
            record = self._records((job_id,)).get(job_id)
            if record is None or record.boot != self._boot() or not self._late(record):
                return []
        except OSError:
            return []
        limits = reversed(record.limits)
        return [limit for limit in limits if (used := self._used(limit)) is not None and used > limit.before]

    def _used(self, limit: RaisedLimit) -> int | None:
        with contextlib.suppress(OSError), self._group(limit) as group:
            return _used(group, limit.name)
        return None

    def _late(self, record: _RaisedLimits) -> bool:
        """Return whether the grace period has passed."""
        return record.over_since is not None and self._clock() - record.over_since >= _GRACE_S

    def _lower(self, job_id: int, *, kill: bool = False) -> bool:
        """Restore the limits of a job if its memory fits. ``kill``: also if the kernel then ends processes."""
        try:
            record = self._records((job_id,)).get(job_id)
            if record is None:
                return True
            now = self._clock()
            late, limits = self._late(record), record.limits if record.boot == self._boot() else ()
            planned = tuple(
                change for limit in limits if (change := self._planned(job_id, limit, late=late, kill=kill)) is not None
            )
            since = now if record.over_since is None else min(record.over_since, now)
            next_record = replace(record, limits=planned, over_since=since)
            if planned and next_record != record:
                self._write(job_id, next_record)
            # In the reverse order of raising.
            failed = [limit for limit in reversed(planned) if not self._restored(limit)]
            if failed:
                return False
            self._path(job_id).unlink(missing_ok=True)
        except OSError as error:
            LOG.warning("job %s: its memory limit is still raised: %s", job_id, error)
            return False
        self._rounds.pop(job_id, None)
        return True

    def _planned(self, job_id: int, limit: RaisedLimit, *, late: bool, kill: bool) -> RaisedLimit | None:
        """Return the limit with the values to write next; ``None`` if the agent no longer raises it."""
        try:
            with self._group(limit) as group:
                value, used, kept_limit = (
                    _number(group, limit.name),
                    _used(group, limit.name),
                    _used_or_dirty(group, limit.name),
                )
        except OSError as error:
            return None if _is_missing(error) else limit
        if value is None or value not in limit.written:
            if value != limit.before:
                LOG.info("job %s: Slurm has changed its memory limit meanwhile, which is kept", job_id)
            return None
        targets = [value]
        if kept_limit is not None and kept_limit <= limit.before:
            targets.append(limit.before)
        elif kept_limit is not None and late:
            targets.append(min(value, _rounded(kept_limit)))
            # Version 1 reclaims what it can, and otherwise refuses the value.
            if limit.name in dict(_V1) or (kill and used is not None and used > limit.before):
                targets.append(limit.before)
        return replace(limit, written=tuple(dict.fromkeys(targets)))

    def _restored(self, limit: RaisedLimit) -> bool:
        """Write the last value of ``written`` that the kernel accepts.

        Return whether that is Slurm's, or the cgroup is gone.
        """
        try:
            with self._group(limit) as group:
                for value in reversed(limit.written):
                    if _number(group, limit.name) == value:
                        return value == limit.before
                    with contextlib.suppress(OSError):  # EBUSY: it uses more; the file remains if the cgroup does
                        group.write(limit.name, str(value))
                        return value == limit.before
        except OSError as error:
            return _is_missing(error)
        return False

    @contextlib.contextmanager
    def _group(self, limit: RaisedLimit) -> Iterator[Cgroup]:
        """Open the cgroup of a raised limit. Raises ``FileNotFoundError`` if it is gone, ``OSError``."""
        with Cgroup(self._cgroups, Path(limit.cgroup)) as group:
            if _identity(group) != (limit.device, limit.inode):
                raise FileNotFoundError(errno.ENOENT, "belongs to another job", limit.cgroup)
            yield group

    # --- records

    def _path(self, job_id: int) -> Path:
        return self._directory / f"{job_id}.json"

    def _write(self, job_id: int, record: _RaisedLimits) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(self._path(job_id), json.dumps({"version": _VERSION, **asdict(record)}), mode=0o600)

    def _records(self, job_ids: Collection[int] | None = None) -> Mapping[int, _RaisedLimits]:
        """Return the records by job. Raises ``OSError`` if one cannot be read now."""
        if job_ids is None:
            try:
                stems = [path.stem for path in self._directory.iterdir() if path.suffix == ".json"]
            except FileNotFoundError:
                return {}
            job_ids = [job_id for stem in stems if (job_id := kernel_text.number(stem)) is not None]
        records = {}
        for job_id in job_ids:
            path = self._path(job_id)
            try:
                records[job_id] = _decoded(path.read_text("utf-8", "replace"))
            except FileNotFoundError:
                continue
            except ValueError as error:
                LOG.warning("%s: ignored, so a memory limit may stay raised: %s", path, error)
                with contextlib.suppress(OSError):
                    path.unlink()
        return records

    def _boot(self) -> str:
        """Return the ID of this boot, in which the inodes of cgroups are unique."""
        return (self._proc / "sys/kernel/random/boot_id").read_text("ascii", "replace").strip()

    # --- cgroups

    @contextlib.contextmanager
    def _opened(self, job_id: int, init: Id) -> Iterator[_Place]:
        """Open the cgroups of a shepherd that limit memory; empty if slurmd has not created them for this job."""
        with contextlib.ExitStack() as stack:
            try:
                process = stack.enter_context(Process(init.pid, started=init.started, proc=self._proc))
                ref = self._finder.of(process)
                lines = process.text("cgroup").split("\n")
                process.stat()  # raises if it ended meanwhile
            except OSError:
                yield _NOWHERE
                return
            place = _NOWHERE
            if ref is not None and ref.source == "cgroup" and ref.job_id == job_id:
                with contextlib.suppress(OSError, ValueError):  # also if its name is too long
                    place = self._place(lines, stack)
            yield place

    def _place(self, lines: Sequence[str], stack: contextlib.ExitStack) -> _Place:
        """Open the cgroups above a process, from its line for the memory controller. Raises ``OSError``."""
        for line in lines:
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            of_job = cgroup_of_job(path)
            if of_job is None or ".." in path.split("/") or (controllers and "memory" not in controllers.split(",")):
                continue
            top = self._cgroups / "memory" if controllers else self._cgroups
            directory, jobs, job = (top / part.lstrip("/") for part in (path, *of_job))
            chain = [top, *reversed([parent for parent in (directory, *directory.parents) if top in parent.parents])]
            groups = [stack.enter_context(Cgroup(self._cgroups, path_)) for path_ in chain]
            job_groups = [group for group in groups if group.path == job or job in group.path.parents]
            if not any(group.has(name) for group in job_groups for name in _USAGE):
                continue  # its memory controller is in the other version
            if any(group.facts().st_uid not in (0, os.geteuid()) for group in job_groups):
                return _NOWHERE  # a user has created it
            return _Place(
                tuple(job_groups), tuple(group for group in groups if group not in job_groups), self._cgroups, jobs
            )
        return _NOWHERE


@dataclass(frozen=True, slots=True)
class _Place:
    """The cgroups of a job that limit its memory."""

    job_groups: tuple[Cgroup, ...]
    """The job's, of the job itself first."""
    above: tuple[Cgroup, ...]
    root: Path
    slurmd: Path
    """The cgroup that contains those of all jobs."""

    def jobs(self) -> Iterator[Cgroup]:
        """Yield the cgroups of all jobs; the caller closes them."""
        if not self.job_groups:
            return
        with contextlib.suppress(OSError), Cgroup(self.root, self.slurmd) as top:
            for name in top.names():
                inner = top.names(name) if name.startswith("uid_") else ()
                for path in [self.slurmd / name, *(self.slurmd / name / cgroup for cgroup in inner)]:
                    of_job = cgroup_of_job(f"/{path.relative_to(self.root)}")
                    if of_job is not None and of_job[1] == f"/{path.relative_to(self.root)}":
                        with contextlib.suppress(OSError):
                            yield Cgroup(self.root, path)


_NOWHERE = _Place((), (), Path("/"), Path("/"))


STILL_RAISED = "the job still uses more than Slurm permits"


def of_spare(spare: SpareMemory | None) -> str:
    """Return why memory does not suffice to raise the limits."""
    if spare is None:
        return "Slurm does not report how much memory of the node is allocated"
    return (
        f"the node can spare {size(spare.available)} ({size(spare.free)} free, less {size(spare.promised)} allocated to"
        f" other jobs, and {size(spare.reserve)} in reserve)"
    )


def _identity(group: Cgroup) -> tuple[int, int]:
    facts = group.facts()
    return facts.st_dev, facts.st_ino


def _rounded(count: int) -> int:
    """Round up to a multiple of ``_STEP``."""
    return -(-count // _STEP) * _STEP


def _smallest_rest(groups: Sequence[Cgroup]) -> int | None:
    """Return the memory left in the most limited cgroup; ``None``: none is limited. Raises ``OSError``."""
    return min((limit.free_bytes for group in groups for limit in _limits(group)), default=None)


def _limits(group: Cgroup) -> list[_Limit]:
    """Return the limits of a cgroup that are set, in the order in which they are raised. Raises ``OSError``."""
    limits = []
    for name in _USAGE:
        if group.has(name) and (value := _number(group, name)) is not None and value < NO_LIMIT:
            used = _used(group, name)
            if used is not None:
                limits.append(_Limit(name, value, value - used))
    return limits


def _used(group: Cgroup, name: str) -> int | None:
    """Return the memory that counts against a limit, without reclaimable memory. Raises ``OSError``."""
    used = _number(group, _USAGE[name])
    return None if used is None else max(0, used - reclaimable(_stat(group)))


def _used_or_dirty(group: Cgroup, name: str) -> int | None:
    """As ``_used``, with memory that the kernel has to write to files before it can reclaim it."""
    used, stat = _number(group, _USAGE[name]), _stat(group)
    sizes = {key: kernel_text.number(value) or 0 for key, _, value in (line.partition(" ") for line in stat)}
    dirty = [max(sizes.get(key, 0) for key in keys) for keys in _TO_WRITE]
    return None if used is None else used - max(0, reclaimable(stat) - sum(dirty))


_TO_WRITE = (("total_dirty", "file_dirty"), ("total_writeback", "file_writeback"))
"""Keys of ``memory.stat`` in versions 1 and 2."""


def _stat(group: Cgroup) -> list[str]:
    return group.text("memory.stat").split("\n")


def _is_missing(error: OSError) -> bool:
    """Return whether a cgroup no longer exists."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENODEV)


def _number(group: Cgroup, name: str) -> int | None:
    """Return a number in a file; ``None``: ``max``. Raises ``OSError``."""
    return kernel_text.number(group.text(name).strip())


def _decoded(text: str) -> _RaisedLimits:
    """Return the record in a file. Raises ``ValueError``."""
    value = json_values.table(json_values.loads(text))
    if value.pop("version", None) != _VERSION:
        raise ValueError("its version is unknown")
    record = json_values.record(_RaisedLimits, value, strict=False)
    for limit in record.limits:
        if limit.name not in _USAGE or not limit.written or min(limit.before, *limit.written) < 0:
            raise ValueError(f"{limit.name!r:.60} is not a limit that was raised")
    if record.over_since is not None and record.over_since < 0:
        raise ValueError("a time is negative")
    return record
