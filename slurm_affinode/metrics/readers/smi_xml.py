"""XML of ``nvidia-smi -q -x``: one document per snapshot, also several in one file (``-l``).

The name of the DTD in each document has the version of the format; the versions differ in the elements of the power.
Expat reads neither the DTD nor entities.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.parsers import expat

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import one_line
from slurm_affinode.metrics.readers.snapshot_times import SnapshotTime, later, time_from_line
from slurm_affinode.metrics.readers.snapshots import SmiDevice, SmiOutput, is_compute_process

BANNER = re.compile(r"\s*(?:<\?xml[^>]*>\s*)?<(?:!DOCTYPE )?nvidia_smi_log\b")
_BEGIN = re.compile(r"<\?xml\b|<(?:!DOCTYPE )?nvidia_smi_log\b")
_END = "</nvidia_smi_log>"
_DTD = re.compile(r"nvsmi_device_v(\d+)\.dtd")
VERSIONS = (10, 11, 12, 13)
"""Versions of the DTD that are read: drivers 375 to 590."""
_ROOT = "nvidia_smi_log"
_POWER = ("power_draw", "average_power_draw", "instant_power_draw")
"""Elements of the power, the best one first."""
_MOST_DEPTH = 32


class _Document:
    """Parser of one document, fed line by line."""

    def __init__(self, line: int, time: SnapshotTime | None, where: str) -> None:
        self.snapshot = SmiOutput(line, where, time, incomplete=f"the document has no {_END}", last_line=line)
        self._where = where
        self._path: list[str] = []
        self._text: list[str] = []
        self._gpu: SmiDevice | None = None
        self._instance: SmiDevice | None = None
        self._power_rank = len(_POWER)
        self._process: dict[str, str] = {}
        self._parser = expat.ParserCreate()
        self._parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        self._parser.StartDoctypeDeclHandler = self._doctype
        self._parser.EntityDeclHandler = self._entity
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._text.append

    def feed(self, text: str, number: int) -> None:
        """Parse a line. Raises ``InputError`` if it is not XML of nvidia-smi."""
        self.snapshot.last_line = number
        try:
            self._parser.Parse(text + "\n", False)
        except expat.ExpatError as error:
            what = expat.ErrorString(error.code)
            raise InputError(f"is not the XML of nvidia-smi: {what}", where=f"{self._where}:{number}") from None

    def _doctype(self, name: str, system: str | None, public: str | None, internal: int) -> None:
        match = _DTD.fullmatch(system or "")
        if name != _ROOT or match is None or int(match.group(1)) not in VERSIONS:
            raise InputError(
                f"has a format of nvidia-smi -q -x that is not known: {one_line(system or name, 60)}",
                where=f"{self._where}:{self.snapshot.last_line}",
                hint=f"nvsmi_device_v{VERSIONS[0]}.dtd to nvsmi_device_v{VERSIONS[-1]}.dtd are read",
            )

    def _entity(self, *declaration: object) -> None:
        raise InputError("declares an entity, as no output of nvidia-smi does",
                         where=f"{self._where}:{self.snapshot.last_line}")  # fmt: skip

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if len(self._path) >= _MOST_DEPTH or (not self._path and name != _ROOT):
            raise InputError("is not the XML of nvidia-smi", where=f"{self._where}:{self.snapshot.last_line}")
        self._path.append(name)
        self._text.clear()
        if name == "gpu" and len(self._path) == 2:
            self._gpu = SmiDevice(self.snapshot.last_line, pci=attributes.get("id"))
            self._power_rank = len(_POWER)
            self.snapshot.add(self._gpu)
        elif name == "mig_device" and self._gpu is not None:
            self._instance = SmiDevice(self.snapshot.last_line, pci=self._gpu.pci, model=self._gpu.model)
        elif name == "process_info":
            self._process = {}

    def _end(self, name: str) -> None:
        value = "".join(self._text).strip()
        self._text.clear()
        path, parent = self._path, self._path[-2] if len(self._path) > 1 else ""
        if name == "timestamp" and parent == _ROOT:
            self.snapshot.add_time(value)
        elif self._gpu is not None:
            self._value(self._gpu, name, parent, value, in_mig="mig_device" in path)
        if name == _ROOT:
            self.snapshot.incomplete = None
            self._name_instances()
        self._path.pop()

    def _value(self, gpu: SmiDevice, name: str, parent: str, value: str, *, in_mig: bool) -> None:
        device = self._instance if in_mig and self._instance is not None else gpu
        if parent == "fb_memory_usage":
            device.used = value if name == "used" else device.used
            device.total = value if name == "total" else device.total
        elif in_mig:
            self._mig_value(device, name, value)
        elif parent == "process_info":
            self._process[name] = value
        elif name == "process_info":
            self._add_process(gpu)
        elif parent == "utilization" and name == "gpu_util":
            device.util = value
        elif parent in ("power_readings", "gpu_power_readings") and name in _POWER[: self._power_rank]:
            device.power, self._power_rank = value, _POWER.index(name)
        elif parent == "gpu" and name in ("uuid", "product_name"):
            device.uuid, device.model = (value, device.model) if name == "uuid" else (device.uuid, value)

    def _mig_value(self, instance: SmiDevice, name: str, value: str) -> None:
        # Compute instances of one GPU instance share its memory.
        if name == "gpu_instance_id" and not any(
            device.pci == instance.pci and device.mig == value for device in self.snapshot.devices
        ):
            instance.mig = value
            self.snapshot.add(instance)

    def _add_process(self, gpu: SmiDevice) -> None:
        instance_id = self._process.get("gpu_instance_id", "N/A")
        mig = None if instance_id == "N/A" else instance_id
        if is_compute_process(self._process.get("type", ""), self._process.get("used_memory", "")):
            for device in self.snapshot.devices:
                if device.pci == gpu.pci and device.mig == mig:
                    device.compute_processes += 1

    def _name_instances(self) -> None:
        """Give MIG instances the UUID of their GPU, which follows them."""
        uuids = {gpu.pci: gpu.uuid for gpu in self.snapshot.devices if gpu.mig is None}
        for device in self.snapshot.devices:
            device.uuid = uuids.get(device.pci)


def parse(lines: Iterator[tuple[str, int]], where: str) -> Iterator[SmiOutput]:
    """Yield the snapshots of a file. The time is ``timestamp``, else that of a line before the document."""
    document: _Document | None = None
    time: SnapshotTime | None = None
    began_at = 0
    for line, number in lines:
        text = line.strip()
        is_start = _BEGIN.match(text) is not None
        # A new document begins with any of three lines, of which the first ones may be missing.
        if is_start and (document is None or text.startswith("<?xml") or number > began_at + 3):
            if document is not None:
                yield document.snapshot
            document, time, began_at = _Document(number, time, where), None, number
        if document is None:
            if (moment := time_from_line(text)) is not None:
                time = later(time, moment)
            continue
        document.feed(text, number)
        if text.endswith(_END):
            yield document.snapshot
            document = None
    if document is not None:
        yield document.snapshot
