"""Scheduling policies of the simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Order = Literal["fcfs", "sjf", "sjf-user", "priority"]
Backfill = Literal["none", "easy", "conservative", "first-fit"]
Times = Literal["requested", "actual", "last-two", "predicted"]


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """How jobs are selected to start."""

    order: Order = "fcfs"
    backfill: Backfill = "easy"
    times: Times = "requested"

    @property
    def reserves(self) -> bool:
        """Return whether jobs that wait have reservations, which estimated run times determine."""
        return self.backfill in ("easy", "conservative")

    @property
    def estimates(self) -> bool:
        """Return whether estimated run times have any influence."""
        return self.order == "sjf" or self.reserves

    @property
    def requests(self) -> bool:
        """Return whether every job needs a requested time."""
        if self.times == "predicted":  # a prediction that a job outruns is corrected to its request
            return self.reserves
        return self.estimates and self.times != "actual"

    def __str__(self) -> str:
        by = f", {self.times} times" if self.estimates else ""
        return f"{self.order}, backfill {self.backfill}{by}"
