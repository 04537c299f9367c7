"""Text of ``nvidia-smi -q``: sections by indentation, ``Key : value``, a section ``GPU 00000000:01:00.0`` per GPU.

The title of a section has no value. With ``-d MEMORY,UTILIZATION`` the sections of a GPU are fewer, and its UUID is
missing. The releases differ in the depth of the alignment, ``Gpu`` or ``GPU`` below Utilization, and the name of the
power (``Power Draw``, since release 550 ``Average Power Draw``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurm_affinode.metrics.readers.snapshot_times import LONGEST_LINE, SnapshotTime, later, time_from_line
from slurm_affinode.metrics.readers.snapshots import SmiDevice, SmiOutput, is_compute_process

BANNER = re.compile(r"[\s>]*(?==+NVSMI LOG=+)")
_GPU = re.compile(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)$")
_PAIR = re.compile(r" *(\S.*?) +:(?: (.*))?$")
_VALUE = re.compile(r"\d+(?:\.\d+)? (?:MiB|MB|%|W)|(?![0-9]).*")
"""A measured value with its unit, or a text such as N/A; a number without a unit was cut off."""
_POWER = ("power draw", "average power draw", "instantaneous power draw")
"""Keys of the power, the best one first."""
_POWER_SECTIONS = ("power readings", "gpu power readings")


class _Query:
    """State of the output that is being read."""

    def __init__(self, snapshot: SmiOutput) -> None:
        self.snapshot = snapshot
        self._path: list[tuple[int, str]] = []
        self._gpu: SmiDevice | None = None
        self._device: SmiDevice | None = None
        """The GPU or its MIG instance."""
        self._power_rank = len(_POWER)
        self._instance = "N/A"
        self._kind = ""

    def read(self, line: str, number: int) -> None:
        """Read a line."""
        if not line.strip():
            return
        self.snapshot.last_line = number
        if match := _GPU.match(line.strip()):
            self._gpu = self._device = SmiDevice(number, pci=match.group(1))
            self._path, self._power_rank, self._instance = [], len(_POWER), "N/A"
            self.snapshot.add(self._gpu)
            return
        pair = _PAIR.fullmatch(line)
        depth = len(line) - len(line.lstrip(" "))
        while self._path and self._path[-1][0] >= depth:
            self._path.pop()
        if pair is None:
            self._path.append((depth, line.strip().lower()))
            if self._path[-1][1] == "mig device" and self._gpu is not None:
                self._device = SmiDevice(number, pci=self._gpu.pci, uuid=self._gpu.uuid, model=self._gpu.model)
            return
        self._value(pair.group(1).lower(), (pair.group(2) or "").strip(), number)

    def _value(self, key: str, value: str, number: int) -> None:
        sections = [name for _, name in self._path]
        if key == "timestamp" and not sections:
            self.snapshot.add_time(value)
        if self._gpu is None or self._device is None:
            return
        if key in ("used", "total", "gpu") and not _VALUE.fullmatch(value):
            self.snapshot.incomplete = f"line {number} has no unit"
        in_mig = "mig device" in sections
        device = self._device if in_mig else self._gpu
        section = sections[-1] if sections else ""
        if section == "fb memory usage":
            device.used = value if key == "used" else device.used
            device.total = value if key == "total" else device.total
        elif in_mig:
            self._mig_value(key, value)
        elif "processes" in sections:
            self._process_value(key, value)
        elif section == "utilization" and key == "gpu":
            device.util = value
        elif section in _POWER_SECTIONS and key in _POWER[: self._power_rank]:
            device.power, self._power_rank = value, _POWER.index(key)
        elif key == "gpu uuid" and not section:
            device.uuid = value
        elif key == "product name" and not section:
            device.model = value

    def _mig_value(self, key: str, value: str) -> None:
        if key == "gpu instance id" and self._device is not None and self._device is not self._gpu:
            self._device.mig = value
            # Compute instances of one GPU instance share its memory.
            if not any(device.pci == self._device.pci and device.mig == value for device in self.snapshot.devices):
                self.snapshot.add(self._device)

    def _process_value(self, key: str, value: str) -> None:
        if key == "gpu instance id":
            self._instance = value
        elif key == "type":
            self._kind = value
        elif key == "used gpu memory" and is_compute_process(self._kind, value) and self._gpu is not None:
            mig = None if self._instance == "N/A" else self._instance
            for device in self.snapshot.devices:
                if device.pci == self._gpu.pci and device.mig == mig:
                    device.compute_processes += 1

    def result(self) -> SmiOutput:
        """Return the snapshot, marked as incomplete if a GPU lacks memory or utilization that the output has.

        With all sections it has both; with ``-d`` at least one of them, the same for all GPUs.
        """
        for device in self.snapshot.devices:
            device.uuid = device.uuid or (self._uuid(device) if device.mig else None)
        gpus = [device for device in self.snapshot.devices if device.mig is None]
        has_all = any(gpu.model is not None for gpu in gpus)
        has_used, has_util = has_all or any(gpu.used for gpu in gpus), has_all or any(gpu.util for gpu in gpus)
        if not gpus:
            self.snapshot.incomplete = "the output has no GPU"
        for gpu in gpus:
            if gpu.used is None and (has_used or gpu.util is None):
                self.snapshot.incomplete = self.snapshot.incomplete or f"GPU {gpu.pci} has no memory"
            elif gpu.util is None and has_util:
                self.snapshot.incomplete = self.snapshot.incomplete or f"GPU {gpu.pci} has no utilization"
        return self.snapshot

    def _uuid(self, instance: SmiDevice) -> str | None:
        return next((gpu.uuid for gpu in self.snapshot.devices if gpu.pci == instance.pci and not gpu.mig), None)


def parse(lines: Iterator[tuple[str, int]], where: str) -> Iterator[SmiOutput]:
    """Yield the snapshots of a file. The time is ``Timestamp``, else that of a line before the output."""
    query: _Query | None = None
    time: SnapshotTime | None = None
    margin = 0
    for line, number in lines:
        text = line[:LONGEST_LINE].expandtabs(4).rstrip()
        if banner := BANNER.match(text):
            if query is not None:
                yield query.result()
            query, margin = _Query(SmiOutput(number, where, time)), banner.end()
            time = None
        elif query is not None and (text[margin:].startswith(" ") or _PAIR.match(text) or _GPU.match(text.strip())):
            query.read(text[margin:] if not text[:margin].strip() else text, number)
        elif (moment := time_from_line(text)) is not None:
            time = later(time, moment)
    if query is not None:
        yield query.result()
