"""The figures as pandas data frames."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from slurm_affinode import api
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.demo.histories import build_demo, synthetic


def test_data_frames_match_the_report(tmp_path: Path) -> None:
    """Jobs, groups and buckets add up to the total of the report's summary."""
    history = synthetic(days=1, seed=3)
    written = build_demo(tmp_path, history)
    start, end = history.since, history.until
    waste = api.waste(start, end, state_dir=tmp_path / "state")
    expected = written.summary["total"]["gpu_hours_allocated"]
    for frame in (waste.jobs, waste.over_time, *waste.groups.values()):
        assert isinstance(frame, pd.DataFrame)
        assert frame["gpu_hours_allocated"].sum() == pytest.approx(expected, abs=1e-3)
    one = api.waste(start, end, state_dir=str(tmp_path / "state"), partitions=["h100"])
    assert set(one.jobs["partition"]) == {"h100"}
    with pytest.raises(AffinodeError, match="no job of user nobody"):
        api.waste(start, end, state_dir=tmp_path / "state", users=["nobody"])


def test_times_are_parsed_as_on_the_command_line(tmp_path: Path) -> None:
    """Strings and datetimes; naive datetimes are local; invalid times are an error."""
    history = synthetic(days=1, seed=3)
    build_demo(tmp_path, history)
    state = tmp_path / "state"
    expected = api.waste(history.since, history.until, state_dir=state).total
    assert api.waste(history.since.isoformat(), history.until.isoformat(), state_dir=state).total == expected
    local = [time.astimezone().replace(tzinfo=None) for time in (history.since, history.until)]
    assert api.waste(*local, state_dir=state).total == expected
    with pytest.raises(AffinodeError, match="not a time"):
        api.waste("banana", "now", state_dir=state)
