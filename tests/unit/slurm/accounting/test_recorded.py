"""Recorded output of Slurm 24.11: all formats have the same content."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_affinode.base.errors import InputError
from slurm_affinode.slurm.accounting import allocations
from slurm_affinode.slurm.accounting.sacct import SacctReading, read
from slurm_affinode.slurm.accounting.schema import Accounting

TEXTS = [
    "parsable2.txt", "parsable-trailing.txt", "unit-separator.txt", "comma.txt", "two-characters.txt", "all-fields.txt",
    "epoch-seconds.txt", "offset.txt", "kolkata.txt",
]  # fmt: skip


@pytest.fixture
def slurm(recorded: Path) -> Path:
    """Return the directory of this release."""
    return recorded / "slurm-24.11"


def parse(path: Path) -> Accounting:
    """Read one file in the time zone it was recorded in."""
    return read(path, reading=SacctReading(zone="Asia/Kolkata" if path.stem == "kolkata" else "UTC"))


@pytest.mark.parametrize("name", TEXTS)
def test_every_field_set_and_delimiter_gives_the_same_jobs(slurm: Path, name: str) -> None:
    """IDs, times and GPUs are those of the JSON recorded at the same time."""
    text, reference = parse(slurm / name), parse(slurm / "sacct-v0.0.42.json")
    assert (text.records, text.jobs.height, text.steps.height) == (62, 27, 35)
    assert not text.problems
    columns = ["job_id", "state", "start", "end", "gpus"]
    key = ["job_id", "start"]
    assert text.jobs.select(columns).sort(key).equals(reference.jobs.select(columns).sort(key))
    of_steps = ["job_id", "step_id", "start", "end"]
    assert text.steps.select(of_steps).sort(of_steps).equals(reference.steps.select(of_steps).sort(of_steps))


def test_text_and_json_agree(slurm: Path) -> None:
    """All fields agree, except those that only one format has, and priorities, which were not requested."""
    key = ["cluster", "job_id", "submit"]
    text, other = (parse(slurm / name).jobs.sort(key) for name in ("unit-separator.txt", "sacct-v0.0.42.json"))
    only_text = {"uid", "cancelled_by", "array_spec", "total_cpu_s"}
    different = {name for name in text.columns if not text[name].equals(other[name])}
    assert different <= only_text | {"priority"}
    assert (text["total_cpu_s"] - other["total_cpu_s"]).abs().max() < 0.001
    assert other.filter(pl.col("job_id") == 27)["array_spec"].to_list() == ["1,4,7,10,13,16,19%2"]


def test_priorities_of_text_and_json_agree(slurm: Path) -> None:
    key = ["cluster", "job_id", "submit"]
    text, other = (parse(slurm / name).jobs.sort(key)["priority"] for name in ("all-fields.txt", "sacct-v0.0.42.json"))
    assert text.null_count() == 0
    assert text.equals(other)


@pytest.mark.parametrize("version", ["v0.0.40", "v0.0.41"])
def test_older_data_parsers_agree(slurm: Path, version: str) -> None:
    """The jobs are the same, as far as the recording has them."""
    old, new = parse(slurm / f"sacct-{version}.json"), parse(slurm / "sacct-v0.0.42.json")
    key = ["job_id", "submit"]
    assert old.jobs.sort(key).equals(new.jobs.join(old.jobs.select(key), on=key, how="semi").sort(key))
    assert old.steps.height == 14
    assert not old.problems


def test_details_of_the_recorded_jobs(slurm: Path) -> None:
    """Requeued, canceled, timed-out, signaled and heterogeneous jobs, a pending array, and the names."""
    parsed = parse(slurm / "unit-separator.txt")
    jobs = {(row["job_id"], row["state"]): row for row in parsed.jobs.iter_rows(named=True)}
    assert jobs[14, "REQUEUED"]["end"] is not None
    assert jobs[14, "RUNNING"]["end"] is None
    assert jobs[15, "CANCELLED"]["cancelled_by"] == "1001"
    assert jobs[11, "FAILED"]["exit_signal"] == 11
    assert jobs[10, "FAILED"]["exit_code"] == 7
    assert jobs[13, "COMPLETED"]["het_job_id"] == 12
    assert jobs[27, "PENDING"]["array_spec"] == "1-19:3%2"
    assert (jobs[27, "PENDING"]["gpus"], jobs[27, "PENDING"]["req_gpus"]) == (None, 2)
    assert jobs[26, "RUNNING"]["node_list"] == "gpu-[01-02]"
    assert jobs[3, "COMPLETED"]["req_mem_bytes"] == 300 << 20
    assert jobs[17, "COMPLETED"]["max_rss_bytes"] == 931820 << 10
    names = set(parsed.jobs["job_name"].to_list())
    assert {"a|b|c", "two\nlines", "<script>alert(1)</script>", "naïve-ß-日本"} <= names


def test_running_jobs_are_completed_by_a_later_recording(slurm: Path) -> None:
    """The keys are the same; GPUs have a type after the cluster began to account for it."""
    early, later = parse(slurm / "parsable2.txt"), parse(slurm / "parsable2-later.txt")
    key = ["cluster", "job_id", "submit"]
    assert early.jobs.join(later.jobs, on=key, how="anti").is_empty()
    ended = later.jobs.filter(pl.col("job_id").is_in([25, 26]))
    assert ended["end"].null_count() == 0
    kinds = dict(later.jobs.select("job_id", "gpu_type").drop_nulls().rows())
    assert kinds == {29: "a100", 30: "a100+l4"}
    assert later.jobs.filter(pl.col("job_id") == 30)["gpus"].to_list() == [2]


def test_table_for_people_is_refused(slurm: Path) -> None:
    """The hint has the options to use."""
    with pytest.raises(InputError, match="default table") as caught:
        parse(slurm / "table-for-people.txt")
    assert "--parsable2" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["scontrol-show-job-d.txt", "scontrol-show-job-d-oneliner.txt"])
def test_scontrol_has_the_gpus_of_running_jobs(slurm: Path, name: str) -> None:
    """They are listed by node and index; scontrol does not keep those of ended jobs, which is reported."""
    result = allocations.read((slurm / name).read_bytes(), where=name)
    assert sorted(result.gpus.select("job_id", "node", "gpu").rows()) == [
        (14, "gpu-02", "1"),
        (25, "gpu-01", "0"),
        (25, "gpu-01", "1"),
        (26, "gpu-01", "2"),
        (26, "gpu-02", "0"),
    ]
    assert result.gpus["start"].null_count() == 0
    assert "scontrol shows them for running jobs only" in result.notes[0]


damage = st.lists(
    st.tuples(
        st.integers(0, 1 << 20),
        st.integers(0, 40),
        st.sampled_from(
            [b"", b"\n", b"|", b"\x1f", b"\r\n", b"9" * 21, b"-", b".", b"[1-99999999]", b"\xff", b":", b'"']
        ),
    ),
    min_size=1,
    max_size=8,
)
FUZZED = ["parsable2.txt", "unit-separator.txt", "name-in-the-middle.txt", "epoch-seconds.txt", "sacct-v0.0.40.json"]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FUZZED), cuts=damage, chunk=st.sampled_from([300, 1 << 20]))
def test_damaged_input_is_read_or_refused_in_one_line(
    slurm: Path, name: str, cuts: list[tuple[int, int, bytes]], chunk: int
) -> None:
    """Bytes of a real file are removed and others inserted; no other exception is raised."""
    data = (slurm / name).read_bytes()
    for at, length, inserted in cuts:
        place = at % len(data)
        data = data[:place] + inserted + data[place + length :]
    try:
        result = read(data, where="in", reading=SacctReading(zone="Europe/Oslo", chunk_bytes=chunk))
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either way is right
    else:
        assert result.jobs["job_id"].null_count() == result.jobs["submit"].null_count() == 0
