"""Monitoring by the driver: the activity of a GPU, and XID errors, which it reports as events.

Activity (Hopper and later) comes from GPU performance monitoring: a sample is an opaque snapshot of counters, and each
metric is the mean between two of them. Source: NVML API reference, "GPM functions".
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

METRICS = {"engine_active": 1, "sm_active": 2, "tensor_active": 5, "dram_active": 10}
"""Field of ``Reading`` -> ``NVML_GPM_METRIC_*``: GRAPHICS_UTIL, SM_UTIL, ANY_TENSOR_UTIL, DRAM_BW_UTIL; in percent."""
SHORTEST_S = 0.1
"""Shortest interval. An earlier call returns the previous result and does not start a new interval."""


class Activity:
    """The two snapshots of one device. ``nvml`` is the binding; its errors are passed on."""

    def __init__(
        self, nvml: Any, handle: Any, gpu_instance: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``gpu_instance``: of a MIG instance; ``handle`` is then that of the whole GPU. ``clock``: in seconds."""
        self._nvml = nvml
        self._clock = clock
        self._read_at: float | None = None
        self._last: dict[str, float] = {}
        self._handle = handle
        self._instance = gpu_instance
        self._before: Any = nvml.nvmlGpmSampleAlloc()
        self._now: Any = nvml.nvmlGpmSampleAlloc()
        self._primed = False

    def read(self) -> dict[str, float]:
        """Return the shares (0-1) since the last call; empty on the first. Metrics that the GPU lacks are omitted."""
        nvml, now = self._nvml, self._clock()
        if self._read_at is not None and 0 <= now - self._read_at < SHORTEST_S:
            return self._last
        if self._instance is None:
            nvml.nvmlGpmSampleGet(self._handle, self._now)
        else:
            nvml.nvmlGpmMigSampleGet(self._handle, self._instance, self._now)
        values: dict[str, float] = {}
        if self._primed:
            request = nvml.c_nvmlGpmMetricsGet_t()
            request.version = nvml.NVML_GPM_METRICS_GET_VERSION
            request.numMetrics = len(METRICS)
            request.sample1, request.sample2 = self._before, self._now
            for index, number in enumerate(METRICS.values()):
                request.metrics[index].metricId = number
            nvml.nvmlGpmMetricsGet(request)
            for index, field in enumerate(METRICS):
                metric = request.metrics[index]
                # NaN if the counters did not advance between the two.
                if metric.nvmlReturn == 0 and 0 <= metric.value <= 100 * 1.05:
                    values[field] = min(1.0, metric.value / 100)
        self._before, self._now, self._primed = self._now, self._before, True
        self._last, self._read_at = values, now
        return values

    def close(self) -> None:
        """Free the snapshots."""
        for sample in (self._before, self._now):
            self._nvml.nvmlGpmSampleFree(sample)


class XidEvents:
    """The XID errors of the GPUs of an open driver. ``nvml`` is the binding. What was seen survives ``close``."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._events: Any = None
        self._watched: set[str] = set()
        self._last: dict[str, int] = {}
        """UUID -> the last error."""

    def watch(self, handles: Mapping[str, Any]) -> None:
        """Watch these GPUs (UUID -> handle), as far as the driver supports it."""
        nvml = self._nvml
        self._watched = set()
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return
        for uuid, handle in handles.items():
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
                self._watched.add(uuid)

    def take(self) -> None:
        """Record the events that have occurred, without waiting."""
        nvml = self._nvml
        while self._watched:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                    self._last[text_of(nvml.nvmlDeviceGetUUID(event.device))] = int(event.eventData)
            except nvml.NVMLError:
                return

    def last(self, uuid: str) -> int | None:
        """Return the last error of a GPU; 0: none so far, ``None``: it is not watched."""
        return self._last.get(uuid, 0) if uuid in self._watched else None

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._watched = set()
        if self._events is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)
            self._events = None


def text_of(value: Any) -> str:
    """Return a text of the binding, which is ``bytes`` in some releases."""
    return value.decode() if isinstance(value, bytes) else str(value)
