"""The figures as pandas frames."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from slurm_affinode import api
from slurm_affinode.demo.build import build_demo
from slurm_affinode.demo.histories import synthetic
from slurm_affinode.errors import AffinodeError


def test_the_frames_are_those_of_the_report(tmp_path: Path) -> None:
    """Jobs, groups and buckets sum to the total of the report's summary."""
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
