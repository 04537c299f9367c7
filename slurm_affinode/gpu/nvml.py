"""The GPUs of this node through NVML; the only module that imports NVIDIA's binding.

A session is opened on demand and dropped when the driver is unloaded, so a reloaded driver is found again. GPUs fail
one by one. ``nvml_devices`` describes them, ``nvml_monitoring`` has their activity and XID errors, ``nvml_errors`` the
meaning of NVML's errors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pynvml

from slurm_affinode.gpu.interface import DriverMissing, GpuError, GpuLost
from slurm_affinode.gpu.nvml_devices import MIB, GpuInventory, OpenGpu
from slurm_affinode.gpu.nvml_errors import NvmlErrors
from slurm_affinode.gpu.nvml_monitoring import XidEvents
from slurm_affinode.model.gpu import Device, GpuFault, GpuProcess, ProcessUtilization, Reading

RESCAN_S = 60.0
"""Interval for reopening the driver while a GPU is lost; a GPU that came back is only detected then."""

_MOST_PCT = 100


class NvmlDriver:
    """``GpuDriver`` on NVML. ``nvml`` is the binding (a fake in tests), ``clock`` seconds of any origin."""

    def __init__(self, nvml: Any = pynvml, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._clock = clock
        self._open: dict[tuple[str, str | None], OpenGpu] | None = None
        self._faults: tuple[GpuFault, ...] = ()
        self._xids = XidEvents(nvml)
        self._lost: set[str] = set()
        self._rescan_at = 0.0
        self._errors = NvmlErrors(nvml)
        self._inventory = GpuInventory(nvml, self._errors, clock)

    # -- GpuDriver ------------------------------------------------------------------------------------------------

    def devices(self) -> Sequence[Device]:
        """Open the driver if needed; return the devices that responded then."""
        if self._open is not None and (self._lost or self._faults) and self._clock() >= self._rescan_at:
            self.close()
        return [gpu.device for gpu in self._open_devices().values()]

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
        self._xids.take()
        return Reading(
            util_pct=None if rates is None else float(rates.gpu),
            memory_util_pct=None if rates is None else float(rates.memory),
            **memory,
            **(self._activity(gpu) or {}),
            power_w=None if power_mw is None else power_mw / 1000,
            energy_mj=energy,
            temperature_c=None if heat is None else float(heat),
            xid=self._xids.last(device.uuid),
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
                    if kind == "compute" or not self._errors.is_unsupported(error):
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
        self._faults, self._lost = (), set()
        if opened is None:
            return
        for gpu in opened.values():
            if gpu.activity is not None:
                with contextlib.suppress(self._nvml.NVMLError):
                    gpu.activity.close()
        self._xids.close()
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    # -- opening --------------------------------------------------------------------------------------------------

    def _open_devices(self) -> dict[tuple[str, str | None], OpenGpu]:
        """Return the open devices, opening the driver if needed."""
        if self._open is None:
            return self._start()
        return self._open

    def _start(self) -> dict[tuple[str, str | None], OpenGpu]:
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
                    for gpu in self._inventory.gpus(handle, index):
                        opened[gpu.device.uuid, gpu.device.mig] = gpu
            except DriverMissing:
                raise
            except GpuError as error:
                faults.append(GpuFault(None, index, str(error)))
        self._faults = tuple(faults)
        self._rescan_at = self._clock() + RESCAN_S
        self._xids.watch({gpu.device.uuid: gpu.whole for gpu in opened.values() if gpu.device.mig is None})
        return opened

    # -- queries --------------------------------------------------------------------------------------------------

    def _of(self, device: Device) -> OpenGpu:
        gpu = self._open_devices().get((device.uuid, device.mig))
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
                if not self._errors.is_unsupported(error):
                    raise
                memory, reserved = nvml.nvmlDeviceGetMemoryInfo(handle), None
        except nvml.NVMLError as error:
            if self._errors.is_unsupported(error) or error.value == nvml.NVML_ERROR_NO_PERMISSION:
                return {}
            raise
        return {"fb_used_mib": memory.used / MIB, "fb_free_mib": memory.free / MIB, "fb_reserved_mib": reserved,
                "fb_total_mib": memory.total / MIB}  # fmt: skip

    def _field(self, gpu: OpenGpu, ask: Callable[..., Any], *arguments: Any) -> Any:
        """Return one field; None if not available now. Raises ``GpuLost`` and ``DriverMissing``."""
        try:
            return ask(*arguments)
        except self._nvml.NVMLError as error:
            if self._errors.is_fatal(error):
                raise self._translated(error, f"GPU {gpu.device.index}", gpu) from error
            return None

    def _activity(self, gpu: OpenGpu) -> dict[str, float] | None:
        if gpu.activity is None:
            return None
        values: dict[str, float] | None = self._field(gpu, gpu.activity.read)
        return values

    @contextlib.contextmanager
    def _asking(self, what: str, gpu: OpenGpu | None = None) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise self._translated(error, what, gpu) from error

    def _translated(self, error: Any, what: str, gpu: OpenGpu | None) -> GpuError:
        translated = self._errors.translated(error, what)
        if isinstance(translated, GpuLost) and gpu is not None:
            self._lost.add(gpu.device.uuid)
        if isinstance(translated, DriverMissing):
            self.close()
        return translated
