"""Activity of a GPU from performance monitoring (Hopper and later): a sample is an opaque snapshot of counters.

Each metric is the mean between two snapshots. Source: NVML API reference, "GPM functions".
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
            for at, number in enumerate(METRICS.values()):
                request.metrics[at].metricId = number
            nvml.nvmlGpmMetricsGet(request)
            for at, field in enumerate(METRICS):
                metric = request.metrics[at]
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
