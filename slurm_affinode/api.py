"""Python API for notebooks and scripts: the figures of a report as pandas frames.

>>> from slurm_affinode import api                                           # doctest: +SKIP
>>> week = api.waste("7d", "now", state_dir="/var/lib/slurm-affinode")       # doctest: +SKIP
>>> week.groups["user"].nlargest(10, "gpu_hours_idle")                       # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path

import pandas as pd

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base import config as configuration
from slurm_affinode.base.times import parse_when
from slurm_affinode.pipeline import report
from slurm_affinode.slurm.times import site_zone


@dataclass(frozen=True, slots=True)
class Waste:
    """Use of the GPU-hours in an interval. Columns and units are those of ``docs/metrics.md``; NaN means unknown."""

    total: Mapping[str, float | int | None]
    jobs: pd.DataFrame
    """One row per attempt of a GPU job, most idle hours first."""
    groups: Mapping[str, pd.DataFrame]
    """``user``, ``account``, ``partition``, ``qos``, ``node``, ``gpu_model``, ``cluster`` -> frame, one row per name.
    """
    over_time: pd.DataFrame
    """One row per time bucket (UTC)."""


def waste(
    since: datetime | str,
    until: datetime | str,
    *,
    state_dir: str | Path | None = None,
    db: str | None = None,
    config: str | Path | None = None,
    clusters: Sequence[str] = (),
    partitions: Sequence[str] = (),
    accounts: Sequence[str] = (),
    users: Sequence[str] = (),
) -> Waste:
    """Analyze the stored data of the half-open interval from ``since`` to ``until``.

    Both are datetimes, or texts as for ``report``: ``7d`` (ago), ``now``, ``2026-11-01``. Times without a zone are in
    the site's time zone.

    ``config``, ``state_dir`` and ``db`` correspond to the options ``--config``, ``--state`` and ``--db``. Raises
    ``AffinodeError`` (``slurm_affinode.base.errors``) like the command ``report``.
    """
    loaded = configuration.load(
        None if config is None else Path(config), state_dir=None if state_dir is None else Path(state_dir), db=db
    )
    zone = site_zone(loaded.cluster.timezone)
    query = WasteQuery(
        _moment(since, zone), _moment(until, zone), tuple(clusters), tuple(partitions), tuple(accounts), tuple(users),
        thresholds=report.thresholds(loaded), zone=zone,
    )  # fmt: skip
    result = report.analyse_stored(loaded, query)
    return Waste(
        result.total,
        result.jobs.to_pandas(),
        {name: frame.to_pandas() for name, frame in result.groups.items()},
        result.over_time.to_pandas(),
    )


def _moment(given: datetime | str, zone: tzinfo) -> datetime:
    return given.astimezone(UTC) if isinstance(given, datetime) else parse_when(given, now=datetime.now(UTC), zone=zone)
