"""XID errors, which the driver reports as events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from slurm_affinode.gpu.nvml_devices import OpenGpu, text_of


class XidEvents:
    """The XID errors of the GPUs of an open driver. ``nvml`` is the binding. What was seen survives ``close``."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._events: Any = None
        self._watched: set[str] = set()
        self._last: dict[str, int] = {}
        """UUID -> the last error."""

    def watch(self, gpus: Iterable[OpenGpu]) -> None:
        """Watch these GPUs, as far as the driver supports it."""
        nvml = self._nvml
        self._watched = set()
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return
        for gpu in gpus:
            if gpu.device.mig is not None:
                continue
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(gpu.whole, nvml.nvmlEventTypeXidCriticalError, self._events)
                self._watched.add(gpu.device.uuid)

    def take(self) -> None:
        """Record the events that have occurred, without waiting."""
        nvml = self._nvml
        while self._watched:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                    self._last[text_of(nvml.nvmlDeviceGetUUID(event.device))] = int(event.eventData)
            except nvml.NVMLError:
                return

    def last(self, uuid: str) -> int | None:
        """Return the last error of a GPU; 0: none so far, ``None``: it is not watched."""
        return self._last.get(uuid, 0) if uuid in self._watched else None

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._watched = set()
        if self._events is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)
            self._events = None
