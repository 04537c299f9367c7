"""A job that sleeps in place, as the agent has it in hand: from its journal, so that the next agent has it too."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from slurm_affinode.agent import words
from slurm_affinode.agent.inplace.asking import Look
from slurm_affinode.agent.inplace.freezer import SIGNALS, Calls
from slurm_affinode.agent.inplace.watching import Own, from_note
from slurm_affinode.agent.journal import Record
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.suspension import Phase, SuspendOption

_RETRY_S, _RETRY_MAX_S = 1.0, 60.0


class Cards(Protocol):
    """The GPUs of this node, as far as jobs share them: ``orchestration.NodeGpus``."""

    def devices(self) -> tuple[Device, ...]:
        """All of them, by index. Raises ``GpuError``."""
        ...

    def processes(self) -> Mapping[str, Mapping[int, int]]:
        """UUID -> PID -> bytes that it holds there. Raises ``GpuError``."""
        ...

    def free_bytes(self, device: Device) -> int | None:
        """Free memory of a device; ``None``: not known. Raises ``GpuError``."""
        ...


@dataclass(slots=True)
class Sleeper:
    """One job, from the moment on in which its GPU memory may have been moved out."""

    record: Record
    job_id: int
    uid: int
    init_pid: int
    init_started: int
    option: SuspendOption
    cuda: tuple[int, ...]
    """Processes with CUDA, in the order in which they are restored."""
    held: Mapping[str, int]
    """UUID -> bytes that it held."""
    why: str
    """It was put to sleep."""
    how: str = SIGNALS
    stay: frozenset[int] = frozenset()
    """Processes that were stopped before we came."""
    calls: Calls = frozenset()
    """Signals that waited already when its suspension began, and that nobody took."""
    since_epoch: float = 0.0
    pids: tuple[int, ...] = ()
    own: Own = field(default_factory=Own)
    on_request: bool = True
    """Not all of its sockets are for its own processes to talk to each other."""
    before: Look = field(default_factory=dict)
    """How its sockets stood before the locks; what came since then is for it."""
    turning: threading.Lock = field(default_factory=threading.Lock)
    """Held while its processes are let go, or frozen again."""
    ahead: tuple[int, ...] = ()
    """Its processes that were let go before those that watch over them; empty: none yet."""
    ahead_epoch: float = 0.0
    """When they were."""
    thawed: bool = False
    """All its processes run, and wait for their GPU memory where they need it."""
    signalled: bool = False
    """It was let go for a signal, and is not frozen again before it was awake."""
    stop_epoch: float | None = None
    """When Slurm last told it to stop, and nothing else since."""
    asked_epoch: float | None = None
    """Since when it is wanted; ``None``: nobody wants it."""
    asked_why: str = ""
    noted: bool = False
    """The journal knows that it is wanted, and since when: it keeps its place in the line of the next agent."""
    turn: int = 0
    """Of those that came at the same time: lower is earlier."""
    waking: bool = False
    waits: str = ""
    """Why it has not been woken yet."""
    held_back: str = ""
    """Why it must not be woken whoever asks, and is not in line."""
    failure: str = ""
    """Why it could not be woken."""
    failures: int = 0
    retry_epoch: float = 0.0
    overdue: bool = False
    told: bool = False
    """Its owner was told by mail that it sleeps, where the site wants that."""

    @property
    def verb(self) -> str:
        """See ``line.InLine``."""
        return "wake"

    @property
    def frozen(self) -> bool:
        """Its processes stand still, as far as is known, and nobody is about to let them go."""
        return self.record.phase is Phase.FROZEN and not self.thawed and not self.waking

    @property
    def can_be_asked(self) -> bool:
        """Somebody outside of it could send a request."""
        return bool(self.own) and self.on_request

    @property
    def said(self) -> str:
        """Its comment while nobody wants it."""
        return words.asleep(self.why, self.gpu_bytes, self.shown, on_request=self.can_be_asked)

    @property
    def shown(self) -> str:
        """Its id for people: of a task ``123_4``, since its plain number may be that of the whole array."""
        return str(self.record.facts.get("shown") or self.job_id)

    @property
    def gpu_bytes(self) -> int:
        """Bytes that were moved out."""
        return sum(self.held.values())

    @property
    def asking(self) -> dict[str, object]:
        """For the journal: since when it is wanted, and why."""
        return {} if self.asked_epoch is None else {"asked": self.asked_epoch, "asked_why": self.asked_why}

    def note(self) -> None:
        """Write that into the journal, for the next agent. Raises ``JournalError``: not tried again."""
        self.noted = True
        self.record.write(self.record.phase, **self.asking)

    def failed(self, why: str, now: float) -> float:
        """It could not be woken; seconds until it is tried again, more each time."""
        pause = min(_RETRY_MAX_S, _RETRY_S * 2.0 ** min(self.failures, 10))
        self.failures += 1
        self.failure, self.retry_epoch = words.one(why), now + pause
        return pause

    def pauses(self, now: float) -> bool:
        """It could not be woken, and is not tried again yet; a clock that was set back does not make that longer."""
        return 0 < self.retry_epoch - now <= _RETRY_MAX_S

    def view(self, now: float, *, held: bool) -> dict[str, Any]:
        """What ``status`` shows of it at that time (epoch); ``held``: Slurm has suspended it."""
        return {
            "starting": False,
            "since": self.since_epoch,
            "asleep_s": max(0.0, now - self.since_epoch),
            "why": self.why,
            "gpu_bytes": self.gpu_bytes,
            "frozen_by": self.how,
            "wakes_on_request": self.can_be_asked,
            "suspended_by_slurm": held,
            "asked": self.asked_epoch,
            "asked_why": self.asked_why or None,
            "waking": self.waking,
            "waits": self.waits or None,
            "overdue": self.overdue,
            "failure": self.failure or None,
        }

    @classmethod
    def of(cls, record: Record) -> Sleeper:
        """From its journal. Raises ``KeyError`` and ``ValueError`` where that is not one of a suspension in place."""
        facts = record.facts
        return cls(
            record=record,
            job_id=record.key.job_id,
            uid=int(facts["uid"]),
            init_pid=int(facts["init_pid"]),
            init_started=int(facts["init_started"]),
            option=SuspendOption.parse(facts["option"]),
            cuda=tuple(int(pid) for pid in facts["cuda"]),
            held={str(uuid): int(count) for uuid, count in facts["held"].items()},
            why=str(facts.get("why") or ""),
            how=str(facts.get("how") or SIGNALS),
            stay=frozenset(int(pid) for pid in facts.get("stopped", ())),
            calls=frozenset((int(pid), int(number)) for pid, number in facts.get("calls", ())),
            since_epoch=record.phases.get(Phase.PARKED.value, float(facts["began"])),
            on_request=bool(facts.get("on_request", True)),
            before=from_note(facts.get("sockets", {})),
            told=Phase.FROZEN.value in record.phases,
        )
