"""Activity of a GPU between two readings, through NVML's GPU performance monitoring (Hopper and later).

A sample is an opaque snapshot of counters; metrics are computed from two of them, so each is the mean over the time
since the last reading. Source: NVML API reference, "GPM functions".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

METRICS = {"engine_active": 1, "sm_active": 2, "tensor_active": 5, "dram_active": 10}
"""Field of ``Reading`` -> ``NVML_GPM_METRIC_*``: GRAPHICS_UTIL, SM_UTIL, ANY_TENSOR_UTIL, DRAM_BW_UTIL; in percent."""


SHORTEST_S = 0.1
"""Not computed over less: whoever asks again so soon gets what the one before got, and takes nothing away."""


class Activity:
    """The two snapshots of one device. ``nvml`` is the binding; its errors are passed on."""

    def __init__(
        self, nvml: Any, handle: Any, gpu_instance: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``gpu_instance``: of a MIG instance, whose ``handle`` is then that of the whole GPU. ``clock``: seconds."""
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
        """Shares (0-1) since the last call; empty at the first, and without the metrics that the GPU does not have."""
        nvml, now = self._nvml, self._clock()
        if self._read_at is not None and 0 <= now - self._read_at < SHORTEST_S:
            return self._last
        if self._instance is None:
            nvml.nvmlGpmSampleGet(self._handle, self._now)
        else:
            nvml.nvmlGpmMigSampleGet(self._handle, self._instance, self._now)
        found: dict[str, float] = {}
        if self._primed:
            request = nvml.c_nvmlGpmMetricsGet_t()
            request.version = nvml.NVML_GPM_METRICS_GET_VERSION
            request.numMetrics = len(METRICS)
            request.sample1, request.sample2 = self._before, self._now
            for at, number in enumerate(METRICS.values()):
                request.metrics[at].metricId = number
            nvml.nvmlGpmMetricsGet(request)
            for at, field in enumerate(METRICS):
                metric = request.metrics[at]
                # NaN where the counters have not moved on between the two.
                if metric.nvmlReturn == 0 and 0 <= metric.value <= 100 * 1.05:
                    found[field] = min(1.0, metric.value / 100)
        self._before, self._now, self._primed = self._now, self._before, True
        self._last, self._read_at = found, now
        return found

    def close(self) -> None:
        """Give the snapshots back."""
        for sample in (self._before, self._now):
            self._nvml.nvmlGpmSampleFree(sample)
