"""Values of a suspension: the option as text, and job names."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import AfterLoss, JobKey, LiveRun, Mode, Notice, Pressure, Steps, SuspendOption

OPTIONS = st.builds(
    SuspendOption,
    window_s=st.integers(1, 10**6),
    util_pct=st.integers(0, 100).map(float),
    mode=st.sampled_from(Mode),
    wake=st.sampled_from(["auto", "hold", "2026-11-21T08:00:00", "now+2hours"]),
    when=st.sampled_from(Pressure),
    signal=st.none() | st.builds(Notice, st.sampled_from(["USR1", "TERM"]), st.integers(0, 600)),
    steps=st.sampled_from(Steps),
    after_loss=st.none() | st.sampled_from(AfterLoss),
)


@given(option=OPTIONS)
def test_option_round_trip(option: SuspendOption) -> None:
    """The text is passed from the plugin to the agent and stored in the manifest."""
    assert SuspendOption.parse(str(option)) == option


def test_missing_keys_have_defaults() -> None:
    """An empty text has all defaults."""
    assert SuspendOption.parse("") == SuspendOption()
    assert SuspendOption.parse("signal=SIGusr1@10").signal == Notice("USR1", 10)


def test_option_of_an_earlier_version_is_readable() -> None:
    """Later keys are written only where they are not the default, so that earlier agents read the text, too."""
    text = "window=900,util=0,mode=requeue,wake=auto,when=pressure"
    assert SuspendOption.parse(text).steps is Steps.SLURM
    assert str(SuspendOption.parse(text)) == text
    assert str(SuspendOption.parse(f"{text},steps=local")) == f"{text},steps=local"
    assert str(SuspendOption.parse(f"{text},after_loss=hold")) == f"{text},after_loss=hold"


@pytest.mark.parametrize(
    "text",
    [
        "steps=mine",
        "after_loss=site",
        "window",
        "window=",
        "window=0",
        "window=x",
        "window=1,window=2",
        "util=101",
        "mode=later",
        "what=1",
        "signal=USR1",
    ],
)
def test_invalid_option_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="suspend option"):
        SuspendOption.parse(text)


def test_job_name_is_not_a_path() -> None:
    """Clusters and IDs that could form another path are refused."""
    assert JobKey("alpha-1_x", 7, 0).name == "alpha-1_x.7"
    for cluster, job_id in (("../x", 7), ("a/b", 7), ("", 7), ("a", 0), ("a.b", 7), ("a", -1)):
        with pytest.raises(ValueError, match="not"):
            JobKey(cluster, job_id, 0)


def test_job_without_submit_time_has_no_key() -> None:
    """Its ID may be that of an earlier job."""
    submit = datetime(2026, 1, 1, tzinfo=UTC)
    unknown: dict[str, Any] = dict.fromkeys(Job.__dataclass_fields__)
    job = Job(**unknown | {"job_id": 7, "uid": 1000, "restarts": 2})
    assert (JobKey.of("alpha", job), LiveRun.of("alpha", job)) == (None, None)
    job = replace(job, submit=submit)
    key = JobKey("alpha", 7, round(submit.timestamp()))
    assert (JobKey.of("alpha", job), LiveRun.of("alpha", job)) == (key, LiveRun(key, 1000, 2))
    assert LiveRun.of("alpha", replace(job, uid=None), uid=1001) == LiveRun(key, 1001, 2)
