"""Python API for notebooks and scripts: the figures of a report as pandas frames, described in ``docs/api.md``.

>>> from slurm_affinode import api                                           # doctest: +SKIP
>>> week = api.waste("7d", "now", state_dir="/var/lib/slurm-affinode")       # doctest: +SKIP
>>> week.groups["user"].nlargest(10, "gpu_hours_idle")                       # doctest: +SKIP
>>> api.columns("unmet_demand")                                              # doctest: +SKIP

The libraries of the extra ``analysis`` are imported with the first call, not with the module.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_affinode.base import config as configuration
from slurm_affinode.base import extras
from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.base.times import parse_when

if TYPE_CHECKING:
    import pandas as pd

    from slurm_affinode.analysis.result import WasteResult

_TYPES = {"text": "string", "time": "datetime64[ms, UTC]", "number": "Int64"}
"""Unit in ``reports/frames.toml`` -> type of pandas; all other columns are floating-point numbers."""


@dataclass(frozen=True, slots=True)
class Waste:
    """Use of the GPU-hours in an interval.

    ``columns`` returns the columns of each frame with their units. Unknown is missing (``pandas.isna``), and never 0;
    times are in UTC, with their zone. A frame is empty if the report has no such section.
    """

    total: Mapping[str, float | int | None]
    """Figures of ``docs/metrics.md`` for everything; ``None``: unknown."""
    jobs: pd.DataFrame
    """One row per attempt of a GPU job, most idle hours first."""
    groups: Mapping[str, pd.DataFrame]
    """``user``, ``account``, ``partition``, ``qos``, ``node``, ``gpu_model``, ``cluster`` -> frame, one row per name.
    """
    gpus: pd.DataFrame
    """One row per GPU."""
    over_time: pd.DataFrame
    """One row per time bucket."""
    working_hours: pd.DataFrame
    """Hours inside and outside of working hours."""
    idle_windows: pd.DataFrame
    """Idle windows of single GPUs by their length."""
    idle_fractions: pd.DataFrame
    """Attempts by their idle share."""
    timelines: pd.DataFrame
    """Slots of the lifetimes of the attempts with most idle hours."""
    waits: pd.DataFrame
    """One row: waits of the jobs that started."""
    unmet_demand: pd.DataFrame
    """GPU-hours that jobs waited for while GPUs idled, by partition."""
    unmet_models: pd.DataFrame
    """The same by model of the idle GPUs."""
    holders: pd.DataFrame
    """Jobs that held these GPUs."""
    actions: pd.DataFrame
    """Owners and causes by the hours that can be returned."""
    suspension_bound: pd.DataFrame
    """One row: upper bound of what suspensions would have returned."""
    trend: pd.DataFrame
    """Earlier periods, oldest first."""
    suspensions: pd.DataFrame
    """One row per suspension."""
    servers: pd.DataFrame
    """One row per inference engine."""
    diagnoses: pd.DataFrame
    """One row per diagnosis of an engine."""
    emissions: pd.DataFrame
    """One row: greenhouse gases of the energy."""
    quality: pd.DataFrame
    """Problems of the data."""


@dataclass(frozen=True, slots=True)
class FrameText:
    """The description of a frame."""

    rows: str
    """Meaning of a row."""
    columns: Mapping[str, tuple[str, str]]
    """Column -> unit and meaning, in the order of the frame."""


@functools.cache
def descriptions() -> Mapping[str, FrameText]:
    """Return frame -> its description; ``groups`` describes each frame of ``Waste.groups``."""
    _require_libraries()
    from slurm_affinode.analysis import definitions  # noqa: PLC0415
    from slurm_affinode.analysis.result import MEASURES  # noqa: PLC0415

    figures = definitions.load()
    counts = {name for name, dtype in MEASURES.items() if dtype.is_integer()}
    measures = {
        name: ("number" if name in counts else figures[name].unit, figures[name].name.lower()) for name in MEASURES
    }
    table = tomllib.loads((asset_dir("reports") / "frames.toml").read_text(encoding="utf-8"))
    return {
        name: FrameText(
            row["rows"],
            {column: (unit, text) for column, (unit, text) in row["columns"].items()}
            | (measures if row.get("measures") else {}),
        )
        for name, row in table.items()
    }


def columns(frame: str) -> pd.DataFrame:
    """Return ``column``, ``unit`` and ``meaning`` of a frame of ``Waste``. Raises ``InputError`` for another name.

    The units ``text``, ``time`` and ``number`` are the pandas types ``string``, ``datetime64[ms, UTC]`` and ``Int64``;
    a column with another unit is ``float64``.
    """
    if (text := descriptions().get(frame)) is None:
        raise InputError(f"there is no frame {frame!r}", hint=f"frames: {', '.join(descriptions())}")
    import pandas as pd  # noqa: PLC0415

    rows = [(name, unit, meaning) for name, (unit, meaning) in text.columns.items()]
    return pd.DataFrame(rows, columns=["column", "unit", "meaning"])


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
    idle_pct: float | None = None,
    low_pct: float | None = None,
    top: int = 15,
    trend: int = 0,
) -> Waste:
    """Analyze the stored data of the half-open interval from ``since`` to ``until``, as ``report`` does.

    Both are datetimes, or texts as for ``report``: ``7d`` (ago), ``now``, ``2026-11-01``. Times without a zone are in
    the site's time zone.

    ``config``, ``state_dir`` and ``db`` correspond to the options ``--config``, ``--state`` and ``--db``; ``idle_pct``
    and ``low_pct`` to ``--idle-pct`` and ``--low-pct`` (percent). ``top``: attempts and engines with a timeline.
    ``trend``: earlier periods that are computed if there are no stored reports; each takes as long as the report.

    Raises ``InputError`` for unusable arguments, and its base class ``AffinodeError`` like the command ``report``
    (``slurm_affinode.base.errors``).
    """
    _require_libraries()
    from slurm_affinode.analysis.result import WasteQuery  # noqa: PLC0415
    from slurm_affinode.pipeline import report  # noqa: PLC0415
    from slurm_affinode.slurm.times import site_zone  # noqa: PLC0415

    loaded = configuration.load(
        None if config is None else Path(config), state_dir=None if state_dir is None else Path(state_dir), db=db
    )
    zone = site_zone(loaded.cluster.timezone)
    query = WasteQuery(
        _moment("since", since, zone), _moment("until", until, zone),
        _names("clusters", clusters), _names("partitions", partitions), _names("accounts", accounts),
        _names("users", users), thresholds=report.thresholds(loaded, idle_pct=idle_pct, low_pct=low_pct), zone=zone,
        working=report.working_time(loaded),
    )  # fmt: skip
    result = report.analyse_stored(loaded, query, top_runs=_count("top", top), engines=True)
    if _count("trend", trend):
        result = replace(result, trend=report.earlier_periods(loaded, query, result, trend))
    return _frames(result)


def _require_libraries() -> None:
    if absent := extras.missing():
        raise InputError(f"slurm_affinode.api: there is no module {', '.join(absent)}", hint=extras.INSTALL)


def _moment(name: str, value: object, zone: tzinfo) -> datetime:
    if isinstance(value, str):
        try:
            return parse_when(value, now=datetime.now(UTC), zone=zone)
        except AffinodeError as error:
            raise InputError(str(error), where=name, hint=error.hint) from error
    if not isinstance(value, datetime) or value != value:  # noqa: PLR0124 - the missing time of pandas is a datetime
        raise InputError(f"{value!r} is not a time", where=name, hint="give a datetime, or a text such as 7d or now")
    return (value.replace(tzinfo=zone) if value.tzinfo is None else value).astimezone(UTC)


def _names(name: str, value: object) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (None,)
    if not all(isinstance(text, str) for text in names):
        raise InputError(f"{value!r} is not a list of names", where=name, hint=f"write for example {name}=['NAME']")
    return names


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise InputError(f"{value!r} is not a number of rows from 0", where=name)
    return value


def _frames(result: WasteResult) -> Waste:
    """Return the frames of a result, with the columns and types of ``descriptions``."""
    from slurm_affinode.analysis import actions  # noqa: PLC0415
    from slurm_affinode.report import summary  # noqa: PLC0415

    demand = result.demand
    bound = summary.bound_figures(result)
    texts = actions.texts()
    returned = [
        {**asdict(action), "title": texts[action.kind].title, "advice": texts[action.kind].advice}
        for action in actions.actions(result, top=len(result.jobs))
    ]
    frames: dict[str, Any] = {
        "jobs": result.jobs,
        "gpus": result.gpus,
        "over_time": result.over_time,
        "working_hours": result.working_hours,
        "idle_windows": result.window_histogram,
        "idle_fractions": result.idle_fraction_histogram,
        "timelines": result.timelines,
        "waits": None if result.waits is None else [asdict(result.waits)],
        "unmet_demand": None if demand is None else demand.partitions,
        "unmet_models": None if demand is None else demand.models,
        "holders": None if demand is None else demand.holders,
        "actions": returned,
        "suspension_bound": None if bound is None else [bound],
        "trend": summary.trend_rows(result),
        "suspensions": result.suspensions,
        **_engines(result),
        "emissions": None if (emissions := summary.emission_figures(result)) is None else [emissions],
        "quality": [
            {name: getattr(issue, name) for name in descriptions()["quality"].columns}
            for issue in result.quality.issues
        ],
    }
    return Waste(
        total=result.total,
        groups={name: _frame("groups", frame) for name, frame in result.groups.items()},
        **{name: _frame(name, rows) for name, rows in frames.items()},
    )


def _engines(result: WasteResult) -> Mapping[str, Any]:
    if result.servers is None:
        return {"servers": None, "diagnoses": None}
    from slurm_affinode.engines.diagnosis.usage import table  # noqa: PLC0415 - many sites have no model servers

    keys = ("cluster", "node", "address", "rank")
    diagnoses = [
        {name: getattr(engine.health.key, name) for name in keys}
        | {"job": engine.health.job}
        | {name: getattr(case, name) for name in descriptions()["diagnoses"].columns if name not in (*keys, "job")}
        for engine in result.servers.engines
        for case in engine.health.diagnoses
    ]
    return {"servers": table(result.servers.engines), "diagnoses": diagnoses}


def _frame(name: str, rows: Any) -> pd.DataFrame:
    """Return a frame of polars, or rows as mappings, with the described columns and types; ``None`` is no row."""
    import pandas as pd  # noqa: PLC0415

    described = descriptions()[name].columns
    types = {column: _TYPES.get(unit, "float64") for column, (unit, _) in described.items()}
    frame = (
        pd.DataFrame(rows or [], columns=list(described))
        if rows is None or isinstance(rows, list)
        else rows.to_pandas()
    )
    return frame[list(described)].astype(types)
