"""The GPUs of this node through NVML; the only module that imports NVIDIA's binding.

A session is opened on demand and dropped when the driver is unloaded, so a reloaded driver is found again. GPUs fail
one by one. Activity (Hopper and later) comes from GPU performance monitoring: a sample is an opaque snapshot of
counters, and each metric is the mean between two of them. Source: NVML API reference, "GPM functions".
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pynvml

from slurm_affinode.gpu.interface import DriverMissing, GpuError, GpuLost, NotPermitted, NotSupported
from slurm_affinode.model.gpu import Device, GpuFault, GpuProcess, ProcessUtilization, Reading

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


MIB = 2**20
RESCAN_S = 60.0
"""Interval for reopening the driver while a GPU is lost; a GPU that came back is only detected then."""

_MOST_PCT = 100
_LIBRARY = "libnvidia-ml.so.1"
_PLACES = ("/usr/local/nvidia/lib64", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/wsl/lib")
"""Locations of NVIDIA's libraries in containers and other distributions, which the loader may not search."""


@dataclass(slots=True)
class _Open:
    """A device with its handles."""

    device: Device
    handle: Any
    whole: Any
    """Handle of the physical GPU; equals ``handle`` for a whole GPU."""
    activity: Activity | None


class NvmlDriver:
    """``GpuDriver`` on NVML. ``nvml`` is the binding (a fake in tests), ``clock`` seconds of any origin."""

    def __init__(self, nvml: Any = pynvml, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._clock = clock
        self._open: dict[tuple[str, str | None], _Open] | None = None
        self._faults: tuple[GpuFault, ...] = ()
        self._events: Any = None
        self._watched: set[str] = set()
        self._xids: dict[str, int] = {}
        self._lost: set[str] = set()
        self._rescan_at = 0.0
        nvml_errors = {
            "gone": ("UNINITIALIZED", "DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND", "LIB_RM_VERSION_MISMATCH"),
            "lost": ("GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND"),
            "unsupported": ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH"),
        }
        self._codes = {
            getattr(nvml, f"NVML_ERROR_{name}"): kind
            for kind, names in nvml_errors.items()
            for name in names
            if hasattr(nvml, f"NVML_ERROR_{name}")
        }

    # -- GpuDriver ------------------------------------------------------------------------------------------------

    def devices(self) -> Sequence[Device]:
        """Open the driver if needed; return the devices that responded then."""
        if self._open is not None and (self._lost or self._faults) and self._clock() >= self._rescan_at:
            self.close()
        return [gpu.device for gpu in self._all().values()]

    def faults(self) -> Sequence[GpuFault]:
        """Return the GPUs that were counted but did not respond when the driver was opened."""
        return self._faults

    def read(self, device: Device) -> Reading:
        """See ``GpuDriver.read``. Memory comes first: an error there concerns the GPU or driver, not one field."""
        gpu = self._of(device)
        nvml, handle = self._nvml, gpu.handle
        with self._asking(f"the memory of GPU {device.index}", gpu):
            memory = self._memory(handle)
        rates = self._field(gpu, nvml.nvmlDeviceGetUtilizationRates, handle)
        # Power, energy and temperature are those of the board; a MIG instance has none of its own.
        board = device.mig is None
        power_mw = self._field(gpu, nvml.nvmlDeviceGetPowerUsage, handle) if board else None
        energy = self._field(gpu, nvml.nvmlDeviceGetTotalEnergyConsumption, handle) if board else None
        heat = self._field(gpu, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU) if board else None
        self._take_events()
        return Reading(
            util_pct=None if rates is None else float(rates.gpu),
            memory_util_pct=None if rates is None else float(rates.memory),
            **memory,
            **(self._activity(gpu) or {}),
            power_w=None if power_mw is None else power_mw / 1000,
            energy_mj=energy,
            temperature_c=None if heat is None else float(heat),
            xid=self._xids.get(device.uuid, 0) if device.uuid in self._watched else None,
        )

    def free_mib(self, device: Device) -> float | None:
        """See ``GpuDriver.free_mib``."""
        gpu = self._of(device)
        with self._asking(f"the memory of GPU {device.index}", gpu):
            return self._memory(gpu.handle).get("fb_free_mib")

    def processes(self, device: Device) -> Sequence[GpuProcess]:
        """See ``GpuDriver.processes``."""
        gpu = self._of(device)
        by_pid: dict[int, GpuProcess] = {}
        for kind, ask in (
            ("graphics", self._nvml.nvmlDeviceGetGraphicsRunningProcesses),
            ("compute", self._nvml.nvmlDeviceGetComputeRunningProcesses),
        ):
            with self._asking(f"the processes on GPU {device.index}", gpu):
                try:
                    running = ask(gpu.handle)
                except self._nvml.NVMLError as error:
                    if kind == "compute" or self._codes.get(error.value) != "unsupported":
                        raise
                    running = []  # a GPU without graphics support
                for process in running:
                    used = process.usedGpuMemory
                    by_pid[process.pid] = GpuProcess(process.pid, None if used is None else used / MIB, kind)
        return sorted(by_pid.values(), key=lambda process: process.pid)

    def process_utilization(self, device: Device, since_us: int = 0) -> Sequence[ProcessUtilization]:
        """See ``GpuDriver.process_utilization``."""
        gpu = self._of(device)
        latest: dict[int, ProcessUtilization] = {}
        with self._asking(f"the utilization of the processes on GPU {device.index}", gpu):
            try:
                samples = self._nvml.nvmlDeviceGetProcessUtilization(gpu.handle, since_us)
            except self._nvml.NVMLError as error:
                # No process was active since then. If the result is empty, the binding may raise an error with the code
                # of success.
                if error.value not in (self._nvml.NVML_ERROR_NOT_FOUND, self._nvml.NVML_SUCCESS):
                    raise
                samples = []
            for s in sorted(samples, key=lambda sample: sample.timeStamp):
                # Drivers also return uninitialized entries: shares above 100, times before the requested one.
                if s.pid and max(s.smUtil, s.memUtil) <= _MOST_PCT and s.timeStamp > since_us:
                    latest[s.pid] = ProcessUtilization(s.pid, s.timeStamp, float(s.smUtil), float(s.memUtil))
        return sorted(latest.values(), key=lambda usage: usage.pid)

    def version(self) -> str:
        """See ``GpuDriver.version``."""
        self.devices()
        with self._asking("the version of the driver", None):
            text = self._nvml.nvmlSystemGetDriverVersion()
        return text.decode() if isinstance(text, bytes) else str(text)

    def close(self) -> None:
        """Close the driver. XIDs seen so far are kept."""
        opened, self._open = self._open, None
        self._faults, self._lost, self._watched = (), set(), set()
        if opened is None:
            return
        for gpu in opened.values():
            if gpu.activity is not None:
                with contextlib.suppress(self._nvml.NVMLError):
                    gpu.activity.close()
        if self._events is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)
            self._events = None
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    # -- opening --------------------------------------------------------------------------------------------------

    def _all(self) -> dict[tuple[str, str | None], _Open]:
        """Return the open devices, opening the driver if needed."""
        if self._open is None:
            return self._start()
        return self._open

    def _start(self) -> dict[tuple[str, str | None], _Open]:
        with self._asking("the driver", None):
            self._nvml.nvmlInit()
        self._open = opened = {}
        faults: list[GpuFault] = []
        with self._asking("the number of GPUs", None):
            count = self._nvml.nvmlDeviceGetCount()
        for index in range(count):
            try:
                with self._asking(f"GPU {index}", None):
                    handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                    for gpu in self._opened(handle, index):
                        opened[gpu.device.uuid, gpu.device.mig] = gpu
            except DriverMissing:
                raise
            except GpuError as error:
                faults.append(GpuFault(None, index, str(error)))
        self._faults = tuple(faults)
        self._rescan_at = self._clock() + RESCAN_S
        self._watch()
        return opened

    def _opened(self, handle: Any, index: int) -> Iterator[_Open]:
        nvml = self._nvml
        # Only the UUID is mandatory.
        whole = Device(
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            index=index,
            pci=self._described(lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId).upper()),
            model=self._described(lambda: _text(nvml.nvmlDeviceGetName(handle))),
            memory_mib=self._described(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total / MIB),
            minor=self._described(lambda: int(nvml.nvmlDeviceGetMinorNumber(handle))),
        )
        mode = self._described(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
        yield _Open(whole, handle, handle, None if mode else self._gpm(handle, None))
        if mode:
            yield from self._instances(whole, handle)

    def _instances(self, whole: Device, handle: Any) -> Iterator[_Open]:
        nvml = self._nvml
        for at in range(self._described(lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))) or 0):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, at)
                number = int(nvml.nvmlDeviceGetGpuInstanceId(part))
            except nvml.NVMLError:
                continue  # instance numbers have gaps
            name = self._described(partial(nvml.nvmlDeviceGetName, part))
            total = self._described(partial(nvml.nvmlDeviceGetMemoryInfo, part))
            device = Device(
                whole.uuid, whole.index, whole.pci, whole.model, minor=whole.minor, mig=str(number),
                mig_profile=_text(name or "").rpartition(" MIG ")[2] or None,
                memory_mib=None if total is None else total.total / MIB,
            )  # fmt: skip
            yield _Open(device, part, handle, self._gpm(handle, number))

    def _described(self, ask: Callable[[], Any]) -> Any:
        """Return an optional value; None if the query fails."""
        try:
            return ask()
        except self._nvml.NVMLError as error:
            if self._codes.get(error.value) in ("gone", "lost"):
                raise
            return None

    def _gpm(self, handle: Any, instance: int | None) -> Activity | None:
        try:
            if not self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                return None
            return Activity(self._nvml, handle, instance, self._clock)
        except self._nvml.NVMLError:
            return None

    # -- queries --------------------------------------------------------------------------------------------------

    def _of(self, device: Device) -> _Open:
        gpu = self._all().get((device.uuid, device.mig))
        if gpu is None:
            raise GpuLost(f"GPU {device.index} ({device.uuid}) is no longer a GPU of this node")
        return gpu

    def _memory(self, handle: Any) -> dict[str, float | None]:
        nvml = self._nvml
        try:
            try:
                memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
                reserved: float | None = memory.reserved / MIB
            except nvml.NVMLError as error:
                if self._codes.get(error.value) != "unsupported":
                    raise
                memory, reserved = nvml.nvmlDeviceGetMemoryInfo(handle), None
        except nvml.NVMLError as error:
            if self._codes.get(error.value) == "unsupported" or error.value == nvml.NVML_ERROR_NO_PERMISSION:
                return {}
            raise
        return {"fb_used_mib": memory.used / MIB, "fb_free_mib": memory.free / MIB, "fb_reserved_mib": reserved,
                "fb_total_mib": memory.total / MIB}  # fmt: skip

    def _field(self, gpu: _Open, ask: Callable[..., Any], *arguments: Any) -> Any:
        """Return one field; None if not available now. Raises ``GpuLost`` and ``DriverMissing``."""
        try:
            return ask(*arguments)
        except self._nvml.NVMLError as error:
            if self._codes.get(error.value) in ("gone", "lost"):
                raise self._translated(error, f"GPU {gpu.device.index}", gpu) from error
            return None

    def _activity(self, gpu: _Open) -> dict[str, float] | None:
        if gpu.activity is None:
            return None
        values: dict[str, float] | None = self._field(gpu, gpu.activity.read)
        return values

    @contextlib.contextmanager
    def _asking(self, what: str, gpu: _Open | None = None) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise self._translated(error, what, gpu) from error

    def _translated(self, error: Any, what: str, gpu: _Open | None) -> GpuError:
        kind = self._codes.get(error.value)
        said = f"{what}: NVML says: {error}"
        if kind == "lost":
            if gpu is not None:
                self._lost.add(gpu.device.uuid)
            return GpuLost(said, hint="see nvidia-smi and the kernel log (dmesg); it may need a reset")
        if kind == "unsupported":
            return NotSupported(said)
        if error.value == self._nvml.NVML_ERROR_NO_PERMISSION:
            return NotPermitted(said, hint="run it as root")
        if kind == "gone" or error.value == self._nvml.NVML_ERROR_UNKNOWN:
            self.close()
            hint = "is NVIDIA's driver installed and loaded? nvidia-smi has to work"
            if error.value == self._nvml.NVML_ERROR_LIBRARY_NOT_FOUND and (place := _lies_in()) is not None:
                hint = f"{_LIBRARY} is in {place}, which is not searched: set LD_LIBRARY_PATH={place}, or run ldconfig"
            return DriverMissing(said, hint=hint)
        return GpuError(said)

    # -- XID errors -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        nvml = self._nvml
        self._watched = set()
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return
        for gpu in (self._open or {}).values():
            if gpu.device.mig is not None:
                continue
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(gpu.whole, nvml.nvmlEventTypeXidCriticalError, self._events)
                self._watched.add(gpu.device.uuid)

    def _take_events(self) -> None:
        """Record XID events that have occurred, without waiting."""
        nvml = self._nvml
        while self._watched:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                    self._xids[_text(nvml.nvmlDeviceGetUUID(event.device))] = int(event.eventData)
            except nvml.NVMLError:
                return


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _lies_in() -> str | None:
    """Return the directory of NVML's library if the loader has not found it."""
    return next((place for place in _PLACES if (Path(place) / _LIBRARY).exists()), None)
