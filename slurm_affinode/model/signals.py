"""The signals that say whether a job is at work, and the noise floor of each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

GPU_SIGNALS = ("utilization", "memory", "engine", "sm", "tensor", "dram", "processes")
"""Activity of a GPU, each in percent. ``utilization`` and ``memory``: share of the driver's last sampling period in
which a kernel ran, or memory was used; ``engine``, ``sm``, ``tensor``, ``dram``: shares since the last sample, of GPUs
that count them; ``processes``: the busiest process since the last sample."""

HOST_SIGNALS = ("cpu", "disk", "io")
"""Activity of a job's processes on the host. ``cpu``: percent of one core; ``disk``: bytes per second from and to
storage; ``io``: bytes per second through reads and writes of any kind, so files, pipes and sockets."""

FLOORS_PCT: Mapping[str, float] = MappingProxyType({"dram": 0.05})
"""Signal of ``GPU_SIGNALS`` -> percent up to which it counts as 0: noise of the counters. An unused L40S reads 0.0131 %
of ``dram``. A site's table (``agent.floors_pct``) replaces this one."""

FIELDS: Mapping[str, tuple[str, float]] = MappingProxyType({
    "util_pct": ("utilization", 1.0), "memory_util_pct": ("memory", 1.0), "engine_active": ("engine", 100.0),
    "sm_active": ("sm", 100.0), "tensor_active": ("tensor", 100.0), "dram_active": ("dram", 100.0),
})  # fmt: skip
"""Field of a sample, or of a reading -> its signal, and what makes it percent."""


FREE_MIB = 600.0
"""What a driver keeps for itself on a GPU that nobody uses."""


def floor_of(field: str, floors_pct: Mapping[str, float]) -> float:
    """The value, in the unit of the field, up to which the field counts as 0."""
    signal, percent = FIELDS[field]
    return floors_pct.get(signal, 0.0) / percent


def without_noise(signals_pct: Mapping[str, float], floors_pct: Mapping[str, float]) -> dict[str, float]:
    """Signals by field, in percent: 0 where a value is at or below the floor of its signal.

    The activity of processes, which is no field of a sample, has the floor of ``processes``.
    """
    floors = {name: floors_pct.get(FIELDS.get(name, ("processes", 1.0))[0], 0.0) for name in signals_pct}
    return {name: 0.0 if value <= floors[name] else value for name, value in signals_pct.items()}
