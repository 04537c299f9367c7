"""The record of a suspension: its facts, stored in the journal, and the values derived from them.

A line of the journal has the facts that it adds or changes. Ledger entry, note and mail are projections of the whole
record; so is the state of a job that sleeps in place (``inplace.sleeper``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from slurm_affinode.base import json_values
from slurm_affinode.checkpoint.files.deleted_files import RemovedFile
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.model.suspension import JobKey, MailKind, Phase, SuspendOption, SuspensionMail
from slurm_affinode.suspension import mail, messages
from slurm_affinode.suspension.records.shared_state import Note


class SocketState(NamedTuple):
    """A socket when a suspension in place began. See ``inplace.sock_diag.Sock``."""

    family: str
    state: int
    waiting: int
    port: int
    received: int


def _stored_as(key: str) -> Any:
    """Return a field that is called ``key`` in the journal."""
    return field(default=None, metadata={"key": key})


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspensionFacts:
    """Facts about a suspension. ``None``: unknown, not reached yet or, in a line of the journal, not changed by it.

    Times are epoch seconds (UTC), sizes bytes, and PIDs those of the node.
    """

    job_id: int | None = None
    """The raw ID."""
    restarts: int | None = None
    """Slurm's restart count of the attempt that is suspended."""
    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] | None = None
    """Supplementary groups of the owner."""
    user: str | None = None
    account: str | None = None
    partition: str | None = None
    job_name: str | None = _stored_as("name")
    shown: str | None = None
    """ID as shown to users: ``123_4``."""
    option: SuspendOption | None = None
    why: str | None = None
    time_left_s: float | None = None
    """Time that the attempt had left before its time limit; ``None`` also if it has none."""
    began_epoch: float | None = _stored_as("began")
    init_pid: int | None = None
    """The shepherd, PID 1 of the job's namespace: since ``restoring``, that of the new attempt."""
    init_started: int | None = None
    """Its start time, in ticks since boot."""
    root_pid: int | None = _stored_as("root")
    """The batch script."""
    cuda_pids: tuple[int, ...] | None = _stored_as("cuda")
    """Processes with a CUDA checkpoint, in restore order."""
    stopped_pids: tuple[int, ...] | None = _stored_as("stopped")
    """Processes that were stopped before the suspension, and remain so."""
    gpus: int | None = None
    gpu_model: str | None = None
    gpu_bytes: int | None = None
    """GPU memory that the processes held."""
    seq: int | None = None
    """Number of the checkpoint image."""
    removed: tuple[RemovedFile, ...] | None = None
    """Files without a name that the dump may have linked."""
    image_bytes: int | None = None
    trouble: str | None = None
    """A problem that was resolved on the way."""
    passed: str | None = None
    """Tiers that did not accept the image, and why."""
    local_files: str | None = None
    """Whether its closed node-local files are in the image, or tie it to this node, and why."""
    tied: bool | None = None
    """It is tied to its node by these files."""
    required_nodes: str | None = None
    """Nodes, separated by commas, that it required before an earlier suspension has tied it to one."""
    run: int | None = None
    """Restart count of the attempt for which the image is restored."""
    runs_since_epoch: float | None = _stored_as("runs_since")
    """When the restored processes began to run, to be observed for a time."""
    runs_in_started: int | None = _stored_as("runs_in")
    """Start time of the shepherd in whose namespace they run, as ``init_started``: another one has to restore them."""
    in_place: bool | None = None
    shares_gpus: bool | None = None
    """In place: Slurm has allocated shares of GPUs to it, not whole GPUs."""
    held_bytes: Mapping[str, int] | None = _stored_as("held")
    """In place: UUID of a GPU -> memory held there."""
    sockets: Mapping[int, SocketState] | None = None
    """In place: inode -> state before the locks."""
    on_request: bool | None = None
    """In place: a request from outside the job can arrive on its sockets."""
    reader_pids: tuple[int, ...] | None = _stored_as("readers")
    """In place: processes that may read a request unnoticed, and those that would compute for it."""
    waits: Mapping[int, str] | None = None
    """In place: thread of these processes -> where it waited in the kernel; empty: it ran."""
    calls: tuple[tuple[int, int], ...] | None = None
    """In place: (PID, signal) of signals that were pending when it began."""
    freeze_mechanism: str | None = _stored_as("how")
    """In place: how the processes are frozen."""
    requested_epoch: float | None = _stored_as("asked")
    """In place: time of the wake request."""
    requested_why: str | None = _stored_as("asked_why")


NO_NEW_FACTS = SuspensionFacts()
"""The facts of a line that only announces a phase."""
_KEYS = {field.name: str(field.metadata.get("key", field.name)) for field in fields(SuspensionFacts)}
_NAMES = {key: name for name, key in _KEYS.items()}


def decode(value: Mapping[str, Any]) -> SuspensionFacts:
    """Return the facts of a line of the journal; unknown ones are ignored. Raises ``ValueError``."""
    values = {_NAMES[key]: fact for key, fact in value.items() if key in _NAMES}
    return json_values.record(SuspensionFacts, values, parsers={SuspendOption: SuspendOption.parse})


def encode(facts: SuspensionFacts) -> dict[str, Any]:
    """Return the known facts as plain values for ``json.dumps``."""
    return {key: _plain(value) for name, key in _KEYS.items() if (value := getattr(facts, name)) is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, SuspendOption):
        return str(value)
    if isinstance(value, tuple):
        return [asdict(item) if isinstance(item, RemovedFile) else item for item in value]
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspensionRecord(SuspensionFacts):
    """One suspension, as far as known: ``None`` is unknown, or not reached yet."""

    key: JobKey
    phase: Phase
    phases: Mapping[Phase, float]
    """Phase -> time of its last announcement (epoch)."""
    restarts: int
    uid: int
    gid: int
    option: SuspendOption
    began_epoch: float
    init_pid: int
    init_started: int
    failure: str | None = None
    """Why the suspension was rolled back; not in the journal."""
    in_use: bool = False
    """Whether that was because the job was in use again; not in the journal."""

    @classmethod
    def of(cls, key: JobKey, lines: Iterable[tuple[Phase, float, SuspensionFacts]]) -> SuspensionRecord:
        """Return the record after these lines of the journal. Raises ``ValueError`` if they are not of a suspension."""
        values: dict[str, Any] = {}
        phases: dict[Phase, float] = {}
        phase = Phase.RUNNING
        for phase, at_epoch, facts in lines:
            phases[phase] = at_epoch
            values |= {name: value for name in _KEYS if (value := getattr(facts, name)) is not None}
        missing = [_KEYS[name] for name in _NEEDED if name not in values]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        if not all(0 <= phase < _YEAR_10000 for phase in (values["began_epoch"], *phases.values())):
            raise ValueError("its times are not finite")
        return cls(key=key, phase=phase, phases=phases, **values)

    @property
    def owner(self) -> User:
        """The rights with which root acts for the job."""
        return User(self.uid, self.gid, self.groups or ())

    @property
    def began_ms(self) -> int:
        """Start of the suspension, in milliseconds; with the job, the key of its ledger entries."""
        return round(self.began_epoch * 1000)

    @property
    def called(self) -> str:
        """ID as shown to users."""
        return self.shown or str(self.key.job_id)

    def ledger_entry(self, node: str) -> LedgerEntry:
        """Return its entry in the ledger of ``node``, on which it was suspended."""

        def ms(phase: Phase) -> int | None:
            return round(self.phases[phase] * 1000) if phase in self.phases else None

        return LedgerEntry(
            cluster=self.key.cluster, job_id=self.key.job_id, submit=self.key.submit_epoch, began_ms=self.began_ms,
            seq=self.seq, user=self.user, uid=self.uid, account=self.account, partition=self.partition, node=node,
            mode=self.option.mode.value, why=_reason(self.why), window_s=self.option.window_s, gpus=self.gpus,
            gpu_model=self.gpu_model, gpu_bytes=self.gpu_bytes, image_bytes=self.image_bytes,
            locked_ms=ms(Phase.LOCKED), parked_ms=ms(Phase.PARKED), dumped_ms=ms(Phase.DUMPED),
            queued_ms=ms(Phase.QUEUED), shares_gpus=None if self.shares_gpus is None else int(self.shares_gpus),
        )  # fmt: skip

    def note(self, node: str, now_epoch: float) -> Note:
        """Return its note for the other nodes. ``now_epoch``: when it was suspended, if the journal does not say."""
        return Note(
            cluster=self.key.cluster, job_id=self.key.job_id, submit=self.key.submit_epoch, restarts=self.restarts,
            seq=self.seq or 0, uid=self.uid, node=node, began_ms=self.began_ms,
            since_epoch=self.phases.get(Phase.QUEUED, now_epoch), why=messages.reason(self.why or ""),
            gpus=self.gpus or 0, gpu_bytes=self.gpu_bytes or 0, image_bytes=self.image_bytes or 0,
            wake=self.option.wake, user=self.user, shown=self.shown, trouble=_reason(self.trouble),
            passed=_reason(self.passed), local_files=_reason(self.local_files), tied=self.tied or None,
        )  # fmt: skip

    def mail(
        self, kind: MailKind, node: str, at_epoch: float, *, why: str | None = None, slept_s: float | None = None,
        ended: bool = False,
    ) -> SuspensionMail | None:  # fmt: skip
        """Return the mail about an event at ``at_epoch``; ``None`` if its owner is unknown. ``ended``: see there."""
        if not self.user:
            return None
        on_request = bool(self.sockets) if self.on_request is None else self.on_request
        return SuspensionMail(
            kind, self.key.cluster, self.key.job_id, self.user, node, at_epoch,
            mail.event(self.key, self.began_epoch) + (".ended" if ended else ""), shown=self.shown,
            job_name=self.job_name, partition=self.partition, why=why, gpus=self.gpus, gpu_model=self.gpu_model,
            gpu_bytes=self.gpu_bytes, slept_s=slept_s, wake=self.option.wake, in_place=bool(self.in_place),
            on_request=on_request, ended=ended,
        )  # fmt: skip


_YEAR_10000 = 253_402_300_800
_NEEDED = ("restarts", "uid", "gid", "option", "began_epoch", "init_pid", "init_started")
"""Facts that the first line of each journal has."""


def _reason(text: str | None) -> str | None:
    return None if text is None else messages.reason(text)
