"""A ``GpuDriver`` in a program on an emulated node: NVIDIA's binding on the emulator's shared library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emulator.node import Program

from slurm_affinode.gpu import interface
from slurm_affinode.model.gpu import Device, GpuFault, GpuProcess, ProcessUtilization, Reading

_SETUP = """
from dataclasses import asdict, is_dataclass
from slurm_affinode.gpu import interface, nvml
from slurm_affinode.model.gpu import Device
driver = nvml.NvmlDriver()
def plain(value):
    if is_dataclass(value):
        return asdict(value)
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value
def attempt(call):
    try:
        return [plain(call()), None, None]
    except interface.GpuError as error:
        return [None, type(error).__name__, str(error)]
"""


class RemoteDriver:
    """Passes each call on to the program, and its errors back."""

    def __init__(self, program: Program) -> None:
        self._program = program
        program.do(_SETUP)

    def devices(self) -> Sequence[Device]:
        return [Device(**fields) for fields in self._call("driver.devices()")]

    def faults(self) -> Sequence[GpuFault]:
        return [GpuFault(**fields) for fields in self._call("driver.faults()")]

    def read(self, device: Device) -> Reading:
        return Reading(**self._call(f"driver.read({device!r})"))

    def free_mib(self, device: Device) -> float | None:
        free: float | None = self._call(f"driver.free_mib({device!r})")
        return free

    def processes(self, device: Device) -> Sequence[GpuProcess]:
        return [GpuProcess(**fields) for fields in self._call(f"driver.processes({device!r})")]

    def process_utilization(self, device: Device, since_us: int = 0) -> Sequence[ProcessUtilization]:
        call = f"driver.process_utilization({device!r}, {since_us})"
        return [ProcessUtilization(**fields) for fields in self._call(call)]

    def version(self) -> str:
        return str(self._call("driver.version()"))

    def close(self) -> None:
        self._call("driver.close()")

    def _call(self, expression: str) -> Any:
        value, error, message = self._program.get(f"attempt(lambda: {expression})")
        if error is not None:
            raise getattr(interface, error)(message)
        return value
