"""The last sweep as Prometheus metrics, under the names and labels of dcgm-exporter.

A value that the GPU cannot give is a series that is not there, never 0. A GPU that several jobs share has each of its
series once for each of them, as dcgm-exporter does. Names and units: dcgm-exporter's default-counters.csv.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from slurm_affinode.model.gpu import GpuSample, Reading, Sweep

Value = Callable[[Reading], float | None]
METRICS: tuple[tuple[str, str, str, Value], ...] = (
    ("DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilization (in %).", lambda r: r.util_pct),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "gauge", "Memory utilization (in %).", lambda r: r.memory_util_pct),
    ("DCGM_FI_DEV_FB_FREE", "gauge", "Framebuffer memory free (in MiB).", lambda r: r.fb_free_mib),
    ("DCGM_FI_DEV_FB_USED", "gauge", "Framebuffer memory used (in MiB).", lambda r: r.fb_used_mib),
    ("DCGM_FI_DEV_FB_RESERVED", "gauge", "Framebuffer memory reserved (in MiB).", lambda r: r.fb_reserved_mib),
    ("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (in W).", lambda r: r.power_w),
    # A counter by nature; prometheus-client gives counters a suffix that DCGM's name does not have.
    (
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "unknown",
        "Total energy consumption since boot (in mJ).",
        lambda r: r.energy_mj,
    ),
    ("DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (in C).", lambda r: r.temperature_c),
    ("DCGM_FI_DEV_XID_ERRORS", "gauge", "Value of the last XID error encountered.", lambda r: r.xid),
    ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", "Ratio of time the engine is active.", lambda r: r.engine_active),
    ("DCGM_FI_PROF_SM_ACTIVE", "gauge", "Ratio of cycles an SM has at least 1 warp assigned.", lambda r: r.sm_active),
    (
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "gauge",
        "Ratio of cycles the tensor (HMMA) pipe is active.",
        lambda r: r.tensor_active,
    ),
    (
        "DCGM_FI_PROF_DRAM_ACTIVE",
        "gauge",
        "Ratio of cycles the device memory interface is active.",
        lambda r: r.dram_active,
    ),
)  # fmt: skip


class LastSweep(Collector):
    """A sink that shows the last sweep to a registry. A sweep older than ``stale_s`` is not shown."""

    def __init__(
        self,
        *,
        node: str,
        cluster: str | None,
        stale_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._node, self._cluster, self._stale_s, self._now = node, cluster, stale_s, now
        self._lock = threading.Lock()
        self._sweep: Sweep | None = None
        self._sweeps = 0

    def put(self, sweep: Sweep) -> None:
        """Show this one from now on."""
        with self._lock:
            self._sweep = sweep
            self._sweeps += 1

    def close(self) -> None:
        """Show nothing more."""
        with self._lock:
            self._sweep = None

    def collect(self) -> Iterator[Metric]:
        """The metrics of one scrape."""
        with self._lock:
            sweep, sweeps = self._sweep, self._sweeps
        fresh = sweep is not None and abs(self._now() - sweep.time_s) <= self._stale_s
        samples = sweep.samples if sweep is not None and fresh else ()
        labelled = [(sample.reading, labels) for sample in samples for labels in self._labels(sample)]
        for name, kind, text, value in METRICS:
            metric = Metric(name, text, kind)
            for reading, labels in labelled:
                number = value(reading)
                if number is not None:
                    metric.add_sample(name, labels, float(number))
            if metric.samples:
                yield metric
        yield from self._own(sweep, sweeps, fresh=fresh)

    def _own(self, sweep: Sweep | None, sweeps: int, *, fresh: bool) -> Iterator[Metric]:
        up = fresh and sweep is not None and sweep.driver_error is None
        values = [
            ("slurm_affinode_exporter_up", "gauge", "Whether the driver answered within the last periods.", float(up)),
            ("slurm_affinode_exporter_sweeps", "counter", "Times that the GPUs were sampled.", float(sweeps)),
        ]
        if up and sweep is not None:
            lost = (
                "slurm_affinode_exporter_gpus_failed",
                "gauge",
                "GPUs that could not be read.",
                float(len(sweep.faults)),
            )
            values.append(lost)
        for name, kind, text, value in values:
            metric = Metric(name, text, kind)
            metric.add_sample(name + ("_total" if kind == "counter" else ""), {}, value)
            yield metric

    def _labels(self, sample: GpuSample) -> list[dict[str, str]]:
        device = sample.device
        labels = {"gpu": str(device.index), "UUID": device.uuid, "device": f"nvidia{_or(device.minor, device.index)}",
                  "Hostname": self._node}  # fmt: skip
        more = {"pci_bus_id": device.pci, "modelName": device.model, "GPU_I_ID": device.mig,
                "GPU_I_PROFILE": device.mig_profile, "cluster": self._cluster}  # fmt: skip
        labels |= {name: text for name, text in more.items() if text is not None}
        return [{**labels, "hpc_job": job} for job in sample.jobs or ()] or [labels]


def _or(value: int | None, other: int) -> int:
    return other if value is None else value
