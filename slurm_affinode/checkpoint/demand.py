"""What is expected of each image, for several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Any

from slurm_affinode.core.eviction import Demand


class SharedDemand(Demand):
    """A ``Demand`` that any thread may use."""

    def __init__(self, **settings: Any) -> None:
        """As ``Demand``."""
        super().__init__(**settings)
        self._lock = threading.RLock()

    def requested(self, name: str, now_s: float) -> None:
        """As ``Demand``."""
        with self._lock:
            super().requested(name, now_s)

    def rates(self, names: Iterable[str], now_s: float, *horizon_s: float) -> dict[str, float]:
        """As ``Demand``."""
        with self._lock:
            return super().rates(names, now_s, *horizon_s)

    def forget(self, name: str) -> None:
        """As ``Demand``."""
        with self._lock:
            super().forget(name)

    def keep(self, names: Collection[str]) -> None:
        """As ``Demand``."""
        with self._lock:
            super().keep(names)

    def state(self) -> dict[str, Any]:
        """As ``Demand``."""
        with self._lock:
            return super().state()
