"""Logs and traces that a queue simulation can read, by kind.

Readers are imported when they are used: the kinds are part of the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurm_affinode.traces.job_log import JobLog


def read(kind: str, path: Path) -> JobLog:
    """Return the log of a kind of ``READERS``. Raises ``InputError`` if it is not one."""
    return READERS[kind](path)


def _swf(path: Path) -> JobLog:
    from slurm_affinode.traces import swf  # noqa: PLC0415

    return swf.read(path)


def _philly(path: Path) -> JobLog:
    from slurm_affinode.traces import philly  # noqa: PLC0415

    return philly.read(path)


def _helios(path: Path) -> JobLog:
    from slurm_affinode.traces import scheduler_logs  # noqa: PLC0415

    return scheduler_logs.read_helios(path)


def _acme(path: Path) -> JobLog:
    from slurm_affinode.traces import scheduler_logs  # noqa: PLC0415

    return scheduler_logs.read_acme(path)


def _pai2020(path: Path) -> JobLog:
    from slurm_affinode.traces import pai2020  # noqa: PLC0415

    return pai2020.job_log(pai2020.read(path, ("pai_job_table", "pai_task_table", "pai_machine_spec")))


def _pai2023(path: Path) -> JobLog:
    from slurm_affinode.traces import alibaba_instances, instances  # noqa: PLC0415

    return instances.job_log(alibaba_instances.read_pai2023(path))


def _dlrm2025(path: Path) -> JobLog:
    from slurm_affinode.traces import alibaba_instances, instances  # noqa: PLC0415

    return instances.job_log(alibaba_instances.read_dlrm2025(path))


def _spot2026(path: Path) -> JobLog:
    from slurm_affinode.traces import spot2026  # noqa: PLC0415

    return spot2026.job_log(spot2026.read(path))


def _site(path: Path) -> JobLog:
    from slurm_affinode.traces import site_trace  # noqa: PLC0415

    return site_trace.job_log(site_trace.read(path))


READERS: Mapping[str, Callable[[Path], JobLog]] = {
    "swf": _swf, "philly": _philly, "helios": _helios, "acme": _acme, "pai2020": _pai2020, "pai2023": _pai2023,
    "dlrm2025": _dlrm2025, "spot2026": _spot2026, "site": _site,
}  # fmt: skip
"""Kind -> reader. The trace asi2026 is not one: its executions have no time of submission."""
