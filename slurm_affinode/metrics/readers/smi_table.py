"""The default table of nvidia-smi, drivers 340 to 590: two or three lines per GPU, MIG instances, processes.

Columns have moved and become wider with the drivers, and the order of the fields has not: the first line of a GPU has
index, name, PCI address; the second one power, memory, utilization. The time is in the line before the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import one_line
from slurm_affinode.metrics.readers.snapshot_times import LONGEST_LINE, SnapshotTime, later, time_from_line
from slurm_affinode.metrics.readers.snapshots import SmiDevice, SmiOutput, is_compute_process

BANNER = re.compile(r"[\s>]*\|\s*NVIDIA-SMI\s+(\S+)")
HEADER = re.compile(r"[\s>]*\|\s*GPU\s+Name\s.*\|\s*Bus-Id\s.*\|")
_SECOND_HEADER = re.compile(
    r"\|\s*Fan\s+Temp\s+Perf\s+Pwr:\s*Usage\s*/\s*Cap\s*\|\s*Memory-Usage\s*\|\s*GPU-Util\s.*\|"
)
_MIG_HEADER = re.compile(r"\|\s*\|\s*\|\s*MIG M\.\s*\|")
_MIG_MODE = re.compile(r"\|\s*\|\s*\|\s*\S+\s*\|")
_QUOTE = re.compile(r"^\s*(?:>\s?)*\s*")
_RULE = re.compile(r"[+|][-=+]{10,}[+|]?$")
_FIRST = re.compile(r"\|\s*(\d{1,4})\s+(\S.*?)\s+\S+\s*\|\s*([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s.*\|")
_SECOND = re.compile(r"\|.*?\s(\S+)\s*/\s*(\S+)\s*\|\s*(\S+)\s*/\s*(\S+)\s*\|\s*(\S+)\s.*\|")
_MIG_TITLE = re.compile(r"\|\s*MIG devices:")
_MIG = re.compile(r"\|\s*(\d+)\s+(\d+)\s+(\d+)\s+(\d+)\s*\|\s*(\S+)\s*/\s*(\S+)\s*\|")
_PROCESS_TITLE = re.compile(r"\|\s*(?:Compute processes|Processes):")
_PROCESS = re.compile(r"\|\s*(\d+)\s+(?:(\d+|N/A)\s+(\d+|N/A)\s+)?(\d+)\s+([CGM](?:\+[CGM])*)\s+\S.*?\s+(\S+)\s*\|")


class _Table:
    """State of the table that is being read."""

    def __init__(self, snapshot: SmiOutput, version: str) -> None:
        self.snapshot = snapshot
        self._version = version
        self.part = "banner"
        """``banner``, ``header``, ``gpus``, ``mig`` or ``processes``."""
        self._device: SmiDevice | None = None
        """The GPU of which only the first line was read."""
        self._is_closed = False
        """Whether a rule follows the last GPU or MIG instance."""
        self._misfit: InputError | None = None
        """The error of a line that does not fit. It is an error if another line follows; else the output is cut off."""
        self._instances: set[tuple[str, str]] = set()

    def read(self, text: str, number: int, where: str) -> None:
        """Read a line of the table. Raises ``InputError`` if the line before it does not fit."""
        if self._misfit is not None:
            raise self._misfit
        self.snapshot.last_line = number
        if _MIG_TITLE.match(text):
            self.part = "mig"
        elif _PROCESS_TITLE.match(text):
            self.part = "processes"
        elif self.part == "mig":
            self._mig(text, number)
        elif self.part == "processes":
            self._process(text)
        elif not self._gpu(text, number):
            self._misfit = _unknown(self._version, text, f"{where}:{number}")

    def _gpu(self, text: str, number: int) -> bool:
        """Read a line up to the end of the GPUs; return False if it does not fit."""
        if _RULE.match(text):
            self._is_closed = self._device is None
            self.part = "gpus" if "=" in text and self.part == "header" else self.part
            return self._is_closed
        if self.part == "banner":
            self.part = "header" if HEADER.match(text) else "banner"
            return self.part == "header" or BANNER.match(text) is not None
        if self.part == "header":
            return _SECOND_HEADER.match(text) is not None or _MIG_HEADER.fullmatch(text) is not None
        if self._device is not None:
            return self._second(text)
        if match := _FIRST.match(text):
            index, name, pci = match.groups()
            # A name that was cut off is not that of a model.
            model = None if name.endswith("...") or name == "ERR!" else name
            self._device, self._is_closed = SmiDevice(number, index, pci, model=model), False
            return True
        return bool(self.snapshot.devices) and _MIG_MODE.fullmatch(text) is not None

    def _second(self, text: str) -> bool:
        match = _SECOND.match(text)
        if match is None or self._device is None:
            return False
        self._device.power, _, self._device.used, self._device.total, self._device.util = match.groups()
        self.snapshot.add(self._device)
        self._device = None
        return True

    def _mig(self, text: str, number: int) -> None:
        self._is_closed = _RULE.match(text) is not None
        if match := _MIG.match(text):
            index, instance, _, _, used, total = match.groups()
            gpu = next((device for device in self.snapshot.devices if device.index == index and not device.mig), None)
            # Compute instances of one GPU instance share its memory.
            if (index, instance) not in self._instances:
                self._instances.add((index, instance))
                model, pci = (gpu.model, gpu.pci) if gpu is not None else (None, None)
                device = SmiDevice(number, index, pci, mig=instance, model=model, used=used, total=total)
                self.snapshot.add(device)

    def _process(self, text: str) -> None:
        if match := _PROCESS.match(text):
            index, instance, _, _, kind, memory = match.groups()
            mig = instance if instance not in (None, "N/A") else None
            for device in self.snapshot.devices:
                if device.index == index and device.mig == mig:
                    device.compute_processes += is_compute_process(kind, memory)

    def result(self) -> SmiOutput:
        """Return the snapshot, marked as incomplete if the table of GPUs has no end."""
        if self._misfit is not None or self._device is not None or not self._is_closed:
            self.snapshot.incomplete = "the table of the GPUs has no last line"
        elif not self.snapshot.devices:
            self.snapshot.incomplete = "the table has no GPU"
        return self.snapshot


def parse(lines: Iterator[tuple[str, int]], where: str) -> Iterator[SmiOutput]:
    """Yield the snapshots of a file. Other text between them is skipped; quotation marks of mails are removed."""
    table: _Table | None = None
    time: SnapshotTime | None = None
    for line, number in lines:
        text = _QUOTE.sub("", line[:LONGEST_LINE]).rstrip()
        banner = BANNER.match(text)
        if banner or (HEADER.match(text) and (table is None or table.part != "banner")):
            if table is not None:
                yield table.result()
            release = banner.group(1) if banner else "of an unknown release"
            table, time = _Table(SmiOutput(number, where, time), release), None
        if text.startswith(("|", "+")):
            if table is not None:
                table.read(text, number, where)
        elif (moment := time_from_line(text)) is not None:
            time = later(time, moment)
    if table is not None:
        yield table.result()


def _unknown(version: str, text: str, where: str) -> InputError:
    return InputError(
        f"is a table of nvidia-smi {one_line(version, 40)} in a layout that is not known: {one_line(text.strip(), 80)}",
        where=where,
        hint="log with nvidia-smi --query-gpu=timestamp,uuid,utilization.gpu,memory.used,power.draw --format=csv -l 30",
    )
