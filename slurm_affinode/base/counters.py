"""Metrics that a process keeps of itself: counters and gauges with labels, without a library. Thread-safe.

Names, kinds and labels are declared; the values of a label that are known beforehand start at 0.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class DeclaredMetric:
    """A declared metric. Names of counters end with ``_total``."""

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Label -> values for which a counter starts at 0; empty: they are not known beforehand."""


class Counters:
    """The values of declared metrics. An undeclared name or label raises ``KeyError``."""

    def __init__(self, metrics: Iterable[DeclaredMetric] = ()) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._lock = threading.Lock()
        """Guards the values."""
        self._values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in self._metrics}
        for metric in self._metrics.values():
            if metric.kind == "counter":
                self._values[metric.name] = dict.fromkeys(product(*metric.labels.values()), 0.0)

    def add(self, name: str, amount: float = 1.0, /, **labels: str) -> None:
        """Increase a counter. A negative amount, as of a clock that was set back, counts as 0."""
        if not self._metrics:
            return
        key = self._key(name, labels)
        with self._lock:
            values = self._values[name]
            values[key] = values.get(key, 0.0) + max(0.0, amount)

    def set(self, name: str, value: float | None, /, **labels: str) -> None:
        """Set a gauge; ``None``: unknown, so that it has no value."""
        if not self._metrics:
            return
        key = self._key(name, labels)
        with self._lock:
            if value is None:
                self._values[name].pop(key, None)
            else:
                self._values[name][key] = value

    def replace(self, name: str, values: Mapping[tuple[str, ...], float], /) -> None:
        """Set a gauge for these values of its labels, in the order of the declaration, and for no others."""
        with self._lock:
            self._values[name] = dict(values)

    def families(self) -> list[dict[str, Any]]:
        """Return the metrics with values, as plain data: ``name``, ``kind``, ``help``, ``samples``."""
        with self._lock:
            values = {name: dict(samples) for name, samples in self._values.items()}
        return [
            {
                "name": metric.name, "kind": metric.kind, "help": metric.help,
                "samples": [[dict(zip(metric.labels, key, strict=True)), value] for key, value in samples.items()],
            }
            for metric in self._metrics.values()
            if (samples := values[metric.name])
        ]  # fmt: skip

    def _key(self, name: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        declared = self._metrics[name].labels
        if len(labels) != len(declared):
            raise KeyError(f"{name} has the labels {', '.join(declared) or '(none)'}")
        return tuple(labels[label] for label in declared)


NO_COUNTERS = Counters()
"""Keeps nothing."""
