"""Comparison of the simulation with published figures (``validation.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import philly, swf
from slurm_affinode.traces.job_log import JobLog
from slurm_affinode.whatif.figures import Figures, figures
from slurm_affinode.whatif.policy import SchedulingPolicy
from slurm_affinode.whatif.simulation import simulate
from slurm_affinode.whatif.workload import Selection, prepare

FILES = {"kth": "KTH-SP2-1996-2.swf.gz", "philly": "philly_pollux.csv.gz"}
"""Log -> name of its file, as published."""
TOLERANCE = 0.01
"""Largest difference that counts as reproduced."""
_HEADINGS = {"mean_wait_s": "mean wait s", "mean_bounded_slowdown": "bounded slowdown", "mean_jct_s": "mean JCT s"}


@dataclass(frozen=True, slots=True)
class Compared:
    """A simulation, and the published figures."""

    log: str
    jobs: int
    capacity: int
    policy: SchedulingPolicy
    selection: Selection
    published: dict[str, float]
    computed: dict[str, float]

    @property
    def difference(self) -> float:
        """Return the largest relative difference."""
        return max(abs(self.computed[name] / value - 1) for name, value in self.published.items())


def cases() -> list[tuple[str, int, SchedulingPolicy, Selection, dict[str, float]]]:
    """Return the rows of ``validation.toml``: log, capacity, policy, selection, published figures."""
    rows = tomllib.loads((Path(__file__).parent / "validation.toml").read_text(encoding="utf-8"))["row"]
    published_cases = []
    for row in rows:
        longest_s = philly.LONGEST_S if row["log"] == "philly" else None
        selection = Selection(longest_s, row.get("sample"), arrivals=row.get("arrivals"))
        published = {name: float(row[name]) for name in _HEADINGS if name in row}
        policy = SchedulingPolicy(row["order"], row["backfill"], row["times"])
        published_cases.append((row["log"], row["capacity"], policy, selection, published))
    return published_cases


def validate(directory: Path) -> Iterator[Compared]:
    """Yield the comparisons. The logs are searched in and below ``directory``. Raises ``InputError``."""
    paths = {log: _find(directory, name) for log, name in FILES.items()}
    logs: dict[str, JobLog] = {"kth": swf.read(paths["kth"]), "philly": philly.read(paths["philly"])}
    for name, capacity, policy, selection, published in cases():
        prepared = prepare(logs[name], capacity, policy, selection)
        starts = simulate(prepared.workload, prepared.capacity, policy)
        replayed: Figures = figures(prepared.workload, starts, prepared.capacity)
        computed = {key: float(getattr(replayed, key)) for key in published}
        yield Compared(name, replayed.jobs, capacity, policy, selection, published, computed)


def table(rows: Sequence[Compared]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return headings and cells of the comparisons of one log."""
    names = list(rows[0].published)
    headings = ["capacity", "jobs", "order", "backfill", "times"]
    for name in names:
        headings += [_HEADINGS[name], "published"]
    cells = [
        (f"{row.capacity:,}", f"{row.jobs:,}", row.policy.order, row.policy.backfill, row.policy.times,
         *(_shown(row, name, values[name]) for name in names for values in (row.computed, row.published)))
        for row in rows
    ]  # fmt: skip
    return headings, cells


def _shown(row: Compared, name: str, value: float) -> str:
    """Return a figure with the decimals of the published ones."""
    decimals = {"mean_bounded_slowdown": 4, "mean_wait_s": 1 if row.log == "kth" else 2, "mean_jct_s": 2}[name]
    return f"{value:,.{decimals}f}"


def _find(directory: Path, name: str) -> Path:
    files = sorted(directory.rglob(name))
    if not files:
        raise InputError(
            f"has no {name}", where=str(directory), hint="docs/whatif.md says where the logs are published"
        )
    return files[0]
