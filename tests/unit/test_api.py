"""The figures as pandas data frames."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from slurm_affinode import api
from slurm_affinode.base import extras
from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.demo.histories import SYNTHETIC_START, build_demo, recorded, synthetic

DAY = synthetic(days=1, seed=3)
ROWS: Mapping[str, tuple[str, ...]] = {
    "over_time": ("over_time", "buckets"),
    "idle_windows": ("window_histogram",),
    "idle_fractions": ("idle_fraction_histogram",),
    "unmet_demand": ("unmet_demand", "partitions"),
    "unmet_models": ("unmet_demand", "models"),
    "holders": ("unmet_demand", "holders"),
    "actions": ("actions",),
    "jobs": ("worst_jobs",),
    "trend": ("trend", "periods"),
    "suspensions": ("suspensions", "list"),
    "servers": ("servers", "list"),
    "quality": ("quality", "issues"),
}
"""Frame -> keys of its rows in ``summary.json``."""
ONE_ROW = {"waits": "waits", "suspension_bound": "suspension_bound", "emissions": "emissions"}


@pytest.fixture(autouse=True)
def site_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the time zone of the demo."""
    monkeypatch.setenv("TZ", "UTC")


def frames(waste: api.Waste) -> dict[str, pd.DataFrame]:
    return {name: frame for name in api.descriptions() if isinstance(frame := getattr(waste, name), pd.DataFrame)}


def plain(value: Any) -> Any:
    """Return a cell as ``summary.json`` has it."""
    if pd.isna(value):
        return None
    if isinstance(value, pd.Timestamp):
        return value.strftime("%Y-%m-%dT%H:%M:%SZ")
    return value


def assert_same_rows(frame: pd.DataFrame, rows: Sequence[Mapping[str, Any]], *, prefix: bool = False) -> None:
    """Columns of the frame have the values of the rows; a summary may have fewer rows than the frame."""
    assert len(frame) >= len(rows) if prefix else len(frame) == len(rows)
    for (_, cells), row in zip(frame.iterrows(), rows, strict=False):
        both = set(frame.columns) & set(row)
        assert len(both) >= min(len(row), 3)
        for name in both:
            expected = row[name]
            if isinstance(expected, float):
                assert cells[name] == pytest.approx(expected, abs=1e-6), name
            else:
                assert plain(cells[name]) == expected, name


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the state directory and the summary of the recorded demo."""
    out = tmp_path_factory.mktemp("recording")
    build_demo(out, recorded())
    return out / "state", json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def invented(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the state directory and the summary of a synthetic day."""
    out = tmp_path_factory.mktemp("invented")
    build_demo(out, DAY)
    return out / "state", json.loads((out / "summary.json").read_text())


def test_frames_equal_the_summary(recording: tuple[Path, dict[str, Any]]) -> None:
    """Each frame has the figures of the report's summary.json."""
    state, summary = recording
    history = recorded()
    waste = api.waste(history.since, history.until, state_dir=state)
    for name, keys in ROWS.items():
        rows: Any = summary
        for key in keys:
            rows = [] if rows is None else rows[key]
        assert_same_rows(getattr(waste, name), rows, prefix=name in ("jobs", "actions", "servers", "suspensions"))
    for name, key in ONE_ROW.items():
        assert_same_rows(getattr(waste, name), [] if summary[key] is None else [summary[key]])
    for name, rows in summary["groups"].items():
        assert_same_rows(waste.groups[name], rows)
    for name, value in summary["total"].items():
        assert waste.total[name] == (value if value is None else pytest.approx(value, abs=1e-6))
    cases = [case for server in summary["servers"]["list"] for case in server["diagnoses"]]
    assert_same_rows(waste.diagnoses, cases)
    gpus = waste.gpus[["gpu_hours_busy", "gpu_hours_idle"]].sum()
    assert gpus["gpu_hours_busy"] == pytest.approx(summary["total"]["gpu_hours_busy"], abs=1e-6)
    assert gpus["gpu_hours_idle"] == pytest.approx(summary["total"]["gpu_hours_idle"], abs=1e-6)


def test_emissions_and_trend_are_those_of_the_configuration(
    recording: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Emissions are those that the site has set; an earlier period is computed on request."""
    state, summary = recording
    history = recorded()
    config = tmp_path / "config.toml"
    config.write_text('[emissions]\ngrams_per_kwh = 400\norigin = "site"\n')
    half = history.since + (history.until - history.since) / 2
    waste = api.waste(half, history.until, state_dir=state, config=config, trend=1)
    (row,) = waste.emissions.to_dict("records")
    energy = waste.total["energy_kwh"]
    assert energy is not None
    assert row["kg_co2e"] == pytest.approx(energy * 0.4)
    assert (row["source"], pd.isna(row["pue"])) == ("site", True)
    (period,) = waste.trend.to_dict("records")
    assert (period["since"], period["until"]) == (history.since, half)
    hours = period["gpu_hours_allocated"] + waste.total["gpu_hours_allocated"]
    assert hours == pytest.approx(summary["total"]["gpu_hours_allocated"], abs=1e-6)


def test_columns_and_types_are_those_described(
    recording: tuple[Path, dict[str, Any]], invented: tuple[Path, dict[str, Any]]
) -> None:
    """Also of empty frames: a unit determines the type, and times have a zone."""
    full = api.waste(recorded().since, recorded().until, state_dir=recording[0])
    other = api.waste(DAY.since, DAY.until, state_dir=invented[0])
    assert len(full.servers) == 1
    assert other.servers.empty
    assert len(other.working_hours) == 2
    for waste in (full, other):
        described = {**frames(waste), **{f"groups {name}": frame for name, frame in waste.groups.items()}}
        assert len(described) == len(api.descriptions()) - 1 + len(waste.groups)
        for name, frame in described.items():
            table = api.columns(name.partition(" ")[0])
            assert list(frame.columns) == list(table["column"])
            types = {"text": "string", "time": "datetime64[ms, UTC]", "number": "Int64"}
            assert [str(dtype) for dtype in frame.dtypes] == [types.get(unit, "float64") for unit in table["unit"]]
            assert (table["meaning"].str.len() > 0).all()


def test_unknown_is_missing(invented: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Without GPU metrics, hours by activity are missing, and not 0."""
    database = f"sqlite:///{invented[0] / 'affinode.sqlite'}"
    waste = api.waste(DAY.since, DAY.until, state_dir=tmp_path, db=database)
    assert waste.jobs["gpu_hours_allocated"].gt(0).all()
    assert waste.jobs[["gpu_hours_idle", "gpu_hours_busy", "util_mean_pct"]].isna().all(axis=None)
    assert waste.unmet_demand["gpu_hours_unmet"].isna().all()
    assert waste.unmet_demand["gpu_hours_waited"].notna().all()
    assert waste.total["gpu_hours_idle"] is None
    assert waste.suspension_bound.empty


def test_sums_of_frames_are_the_total(invented: tuple[Path, dict[str, Any]]) -> None:
    """Jobs, groups, buckets, and working hours with all other time add up to the total of the report's summary."""
    state, summary = invented
    waste = api.waste(DAY.since, DAY.until, state_dir=state)
    assert_same_rows(waste.working_hours, summary["working_hours"]["hours"])
    expected = summary["total"]["gpu_hours_allocated"]
    for frame in (waste.jobs, waste.over_time, waste.working_hours, *waste.groups.values()):
        assert frame["gpu_hours_allocated"].sum() == pytest.approx(expected, abs=1e-3)


def test_filters_select_jobs(invented: tuple[Path, dict[str, Any]]) -> None:
    """A name that no job has is an error, as in the command."""
    part = api.waste(DAY.since, DAY.until, state_dir=str(invented[0]), partitions=["h100"])
    assert set(part.jobs["partition"]) == {"h100"}
    with pytest.raises(AffinodeError, match="no job of user nobody"):
        api.waste(DAY.since, DAY.until, state_dir=invented[0], users=["nobody"])


def test_times_are_parsed_as_on_the_command_line(invented: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Strings and datetimes; those without a zone are in the site's."""
    state, summary = invented
    expected = pytest.approx(summary["total"]["gpu_hours_allocated"], abs=1e-6)
    texts = (DAY.since.isoformat(), DAY.until.isoformat())
    assert api.waste(*texts, state_dir=state).total["gpu_hours_allocated"] == expected
    config = tmp_path / "config.toml"
    config.write_text('[cluster]\ntimezone = "Asia/Tokyo"\n')
    local = [datetime(2026, 11, day, 9) for day in (2, 3)]  # noqa: DTZ001 - the site's time
    assert DAY.since == SYNTHETIC_START == datetime(2026, 11, 2, tzinfo=UTC)
    assert api.waste(*local, state_dir=state, config=config).total["gpu_hours_allocated"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"since": "banana"}, r"since: 'banana' is not a time"),
        ({"since": 7}, "since: 7 is not a time"),
        ({"until": pd.NaT}, "until: NaT is not a time"),
        ({"users": "alice"}, "users: 'alice' is not a list of names"),
        ({"accounts": [None]}, r"accounts: \[None\] is not a list of names"),
        ({"top": -1}, "top: -1 is not a number"),
        ({"trend": 1.5}, "trend: 1.5 is not a number"),
    ],
)
def test_bad_arguments_are_input_errors(
    recording: tuple[Path, dict[str, Any]], arguments: dict[str, Any], message: str
) -> None:
    state, _ = recording
    defaults = {"since": recorded().since, "until": recorded().until, "state_dir": state}
    with pytest.raises(InputError, match=message):
        api.waste(**{**defaults, **arguments})


def test_unknown_frame_is_an_input_error() -> None:
    with pytest.raises(InputError, match="there is no frame 'job'") as raised:
        api.columns("job")
    assert "jobs" in str(raised.value.hint)


def test_missing_libraries_are_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names them and the command that installs them; importing the module needs none of them."""
    monkeypatch.setattr(extras, "missing", lambda: ["pandas", "polars"])
    with pytest.raises(InputError, match="no module pandas, polars") as raised:
        api.waste("7d", "now")
    assert raised.value.hint == extras.INSTALL
    script = (
        "import sys, slurm_affinode.api; print(sorted({'numpy', 'pandas', 'polars', 'pyarrow'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
