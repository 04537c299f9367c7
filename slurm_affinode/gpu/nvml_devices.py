"""The GPUs of a node and their MIG instances, with the handles of an open driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from slurm_affinode.gpu.nvml_errors import NvmlErrors
from slurm_affinode.gpu.nvml_monitoring import Activity, text_of
from slurm_affinode.model.gpu import Device

MIB = 2**20


@dataclass(slots=True)
class OpenGpu:
    """A device with its handles."""

    device: Device
    handle: Any
    whole: Any
    """Handle of the physical GPU; equals ``handle`` for a whole GPU."""
    activity: Activity | None


class GpuInventory:
    """Describes the GPUs of an open driver. ``nvml`` is the binding."""

    def __init__(self, nvml: Any, errors: NvmlErrors, clock: Callable[[], float]) -> None:
        """``clock``: see ``Activity``."""
        self._nvml = nvml
        self._errors = errors
        self._clock = clock

    def gpus(self, handle: Any, index: int) -> Iterator[OpenGpu]:
        """Yield a GPU and its MIG instances. Raises the errors of the binding."""
        nvml = self._nvml
        # Only the UUID is mandatory.
        whole = Device(
            uuid=text_of(nvml.nvmlDeviceGetUUID(handle)),
            index=index,
            pci=self._described(lambda: text_of(nvml.nvmlDeviceGetPciInfo(handle).busId).upper()),
            model=self._described(lambda: text_of(nvml.nvmlDeviceGetName(handle))),
            memory_mib=self._described(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total / MIB),
            minor=self._described(lambda: int(nvml.nvmlDeviceGetMinorNumber(handle))),
        )
        mode = self._described(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
        yield OpenGpu(whole, handle, handle, None if mode else self._gpm(handle, None))
        if mode:
            yield from self._instances(whole, handle)

    def _instances(self, whole: Device, handle: Any) -> Iterator[OpenGpu]:
        nvml = self._nvml
        for index in range(self._described(lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))) or 0):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                number = int(nvml.nvmlDeviceGetGpuInstanceId(part))
            except nvml.NVMLError:
                continue  # instance numbers have gaps
            name = self._described(partial(nvml.nvmlDeviceGetName, part))
            total = self._described(partial(nvml.nvmlDeviceGetMemoryInfo, part))
            device = Device(
                whole.uuid, whole.index, whole.pci, whole.model, minor=whole.minor, mig=str(number),
                mig_profile=text_of(name or "").rpartition(" MIG ")[2] or None,
                memory_mib=None if total is None else total.total / MIB,
            )  # fmt: skip
            yield OpenGpu(device, part, handle, self._gpm(handle, number))

    def _described(self, ask: Callable[[], Any]) -> Any:
        """Return an optional value; None if the query fails."""
        try:
            return ask()
        except self._nvml.NVMLError as error:
            if self._errors.is_fatal(error):
                raise
            return None

    def _gpm(self, handle: Any, instance: int | None) -> Activity | None:
        try:
            if not self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                return None
            return Activity(self._nvml, handle, instance, self._clock)
        except self._nvml.NVMLError:
            return None
