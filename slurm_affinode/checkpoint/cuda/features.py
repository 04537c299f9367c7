"""Checkpoint features of a CUDA driver, derived from facts about the driver. Pure functions.

API functions are looked up with ``cuGetProcAddress``, for the CUDA version that introduced them. Two features have no
function of their own (a field of a structure, driver internals): they are derived from the CUDA version of the driver
library and from the version of the kernel driver if that is known, whichever is older.

Sources: CUDA driver API 12.8 to 13.5, "CUDA Checkpointing"; README of NVIDIA's ``cuda-checkpoint`` (features of 570,
580, 610); CUDA release notes (570 is CUDA 12.8, 575 12.9, 580 13.0, 590 13.1, 595 13.2, 610 13.3, 615 13.4). On ARM
processors (Grace) drivers before 595 lock a process and then refuse its checkpoint: NVIDIA/cuda-checkpoint#51;
NVIDIA/nvcf#730.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm_affinode.checkpoint.interface import Ability, Capabilities, Feature

COMPLETE = "cuCheckpointOperationComplete"

ENTRY_POINTS = {
    "cuCheckpointProcessLock": 12080,
    "cuCheckpointProcessCheckpoint": 12080,
    "cuCheckpointProcessRestore": 12080,
    "cuCheckpointProcessUnlock": 12080,
    "cuCheckpointProcessGetState": 12080,
    "cuCheckpointProcessGetRestoreThreadId": 12080,
    COMPLETE: 13040,
}
"""Function -> the CUDA version that introduced it (1000 * major + 10 * minor)."""

JOB_FILE = "CUDA_CHECKPOINT_JOB_FILE"
"""Environment variable of processes started with ``cuda-checkpoint --launch-job``."""

_VERSION = re.compile(r"(\d+)(?:\.\d+)*")
_P = "cuCheckpointProcess"
_ARM = "aarch64"
_ALL_OF = frozenset({Feature.LOCK, Feature.CHECKPOINT, Feature.RESTORE})
"""Features that every suspension needs."""


@dataclass(frozen=True, slots=True)
class Need:
    """Requirements of a feature."""

    feature: Feature
    driver: int
    """First driver branch that has the feature."""
    cuda: int
    """CUDA version of that branch."""
    functions: tuple[str, ...] = ()
    structure: str | None = None
    """Structure that the bindings must have."""
    by_version: bool = False
    """The feature is detected by versions, as no function indicates it."""
    arm: int = 0
    """First branch on ARM processors, if it differs; no function indicates it."""
    with_what: str = ""
    """Remark shown when the feature is available."""

    def first(self, machine: str) -> int:
        """Return the first driver branch that has the feature on this architecture (``os.uname().machine``)."""
        return max(self.driver, self.arm) if machine == _ARM else self.driver


NEEDS = (
    Need(Feature.LOCK, 570, 12080, (f"{_P}Lock", f"{_P}Unlock", f"{_P}GetState"), "CUcheckpointLockArgs"),
    Need(Feature.CHECKPOINT, 570, 12080, (f"{_P}Checkpoint", f"{_P}GetRestoreThreadId"), arm=595),
    Need(Feature.RESTORE, 570, 12080, (f"{_P}Restore",), arm=595),
    Need(
        Feature.MIGRATION, 580, 13000, (f"{_P}Restore",), "CUcheckpointGpuPair", by_version=True, arm=595,
        with_what="GPUs of the same chip, by pairs of UUIDs",
    ),
    Need(
        Feature.IPC, 610, 13030, (f"{_P}Checkpoint",), by_version=True,
        with_what="of processes started with cuda-checkpoint --launch-job",
    ),
    Need(
        Feature.CUSTOM_STORAGE, 615, 13040, (COMPLETE,),
        with_what="the driver maps GPU memory for the one who copies it",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """Facts about the driver and the bindings, from the helper's ``hello`` call."""

    cuda: int | None
    """CUDA version of the driver library: 13000 for 13.0."""
    functions: Mapping[str, bool] = field(default_factory=dict)
    """Function of ``ENTRY_POINTS`` -> whether the driver has it."""
    bound: Sequence[str] = ()
    """Functions and structures of the installed bindings."""
    bindings: str | None = None
    """Version of the bindings."""

    @classmethod
    def of(cls, reported: Mapping[str, Any]) -> DriverFacts:
        """Convert the answer to ``hello``."""
        return cls(reported["cuda"], dict(reported["functions"]), tuple(reported["bound"]), reported["bindings"])


def major_of(version: str | None) -> int | None:
    """Return the driver branch: 580 for ``580.95.05``."""
    match = _VERSION.match(version or "")
    return int(match[1]) if match else None


def cuda_text(cuda: int | None) -> str | None:
    """Format a CUDA version: ``13.0`` for 13000."""
    return None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"


def capabilities_of(version: str | None, facts: DriverFacts, *, mig: bool, machine: str = "") -> Capabilities:
    """Return the features of a driver of this version with these bindings. ``machine``: see ``Need.first``."""
    table = tuple(_ability(need, version, facts, need.first(machine)) for need in NEEDS)
    available = {row.feature for row in table if row.available}
    why = None
    if major_of(version) is None:
        why = "the driver does not report its version"
    elif not available >= _ALL_OF:
        why = next(row.why for row in table if not row.available)
    elif mig:
        why = "MIG is on, and MIG instances cannot be checkpointed"
    return Capabilities(
        version,
        checkpoint=why is None,
        why_not=why,
        cuda=cuda_text(facts.cuda),
        bindings=facts.bindings,
        table=table,
    )


def unavailable(version: str | None, why: str, *, machine: str = "") -> Capabilities:
    """Return the capabilities if the driver cannot be queried: no features."""
    table = tuple(Ability(need.feature, need.first(machine), available=False, why=why) for need in NEEDS)
    return Capabilities(version, why_not=why, table=table)


def refusal(feature: Feature, capabilities: Capabilities) -> str | None:
    """Return in one line why a feature cannot be used here, or ``None`` if it can."""
    for row in capabilities.table:
        if row.feature is feature and not row.available:
            return f"{feature}: {row.why}"
    return capabilities.why_not


def _ability(need: Need, version: str | None, facts: DriverFacts, first: int) -> Ability:
    def no(why: str) -> Ability:
        return Ability(need.feature, first, available=False, why=why)

    branch = major_of(version)
    named = f"driver {version}" if version else "the driver"
    absent = [name for name in need.functions if not facts.functions.get(name, False)]
    too_old = branch is not None and branch < first
    if (need.by_version or first > need.driver) and too_old:
        return no(f"{named} cannot{' on an ARM processor' * (first > need.driver)} ({first} can)")
    # The driver library does not match the kernel driver, for example because a container has its own.
    unlike = absent and branch is not None and not too_old
    if (need.by_version or unlike) and (facts.cuda or 0) < need.cuda:
        has = cuda_text(facts.cuda) or "unknown"
        return no(f"the driver's library is of CUDA {has} ({cuda_text(need.cuda)} can, driver {first})")
    if absent:
        return no(f"{named} has no {absent[0]} ({first} has it)")
    # The bindings look COMPLETE up for CUDA 13.5, but driver 615 has it since 13.4: it is called by address.
    bound = (*(name for name in need.functions if name != COMPLETE), *filter(None, [need.structure]))
    unbound = [name for name in bound if name not in facts.bound]
    if unbound:
        return no(f"the installed cuda-bindings have no {unbound[0]} ({cuda_text(need.cuda)} has it)")
    shown = f"driver {version}, CUDA {cuda_text(facts.cuda)}" if need.by_version else ", ".join(need.functions)
    return Ability(need.feature, first, available=True, why=f"{shown}: {need.with_what}".rstrip(": "))
