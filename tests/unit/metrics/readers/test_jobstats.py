"""jobstats summaries in AdminComment: decoding, missing values, and reports on damaged summaries."""

from __future__ import annotations

import base64
import gzip
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.metrics.readers import jobstats
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, JOBS, conform

T0 = datetime(2026, 3, 1, tzinfo=UTC)
MIB = 1 << 20


def pack(summary: object) -> str:
    return "JS1:" + base64.b64encode(gzip.compress(json.dumps(summary).encode(), mtime=0)).decode()


def node(**values: Any) -> dict[str, Any]:
    return {"nodes": {"gpu1.example.org": values}, "total_time": 60, "gpus": 1}


def jobs(*comments: str | None) -> pl.DataFrame:
    rows = pl.DataFrame(
        {
            "cluster": "c", "job_id": list(range(1, len(comments) + 1)), "start": T0,
            "end": T0 + timedelta(seconds=60), "admin_comment": pl.Series(comments, dtype=pl.String),
        }
    )  # fmt: skip
    return conform(rows, JOBS)


def test_summary_has_a_row_per_gpu() -> None:
    """Utilization is in percent, memory is converted from bytes to MiB, the node has its short name."""
    comment = pack(
        node(gpu_utilization={"0": 12.5, "10": 0}, gpu_used_memory={"0": 3 * MIB}, gpu_total_memory={"0": 8 * MIB})
    )
    findings = jobstats.find(jobs(comment))
    assert findings.averages.select("node", "index", "util_pct", "fb_used_mib", "fb_total_mib").rows() == [
        ("gpu1", 0, 12.5, 3.0, 8.0),
        ("gpu1", 10, 0.0, None, None),
    ]
    assert findings.allocation_gpus().schema == pl.Schema(ALLOCATION_GPUS)
    assert findings.allocation_gpus()["gpu"].to_list() == ["0", "10"]
    assert findings.samples().height == 4


def test_short_and_none_mean_no_data() -> None:
    """jobstats writes these words itself; other comments are ignored."""
    findings = jobstats.find(jobs("JS1:Short", "JS1:None", None, "", "a note", "JS2:later"))
    assert (findings.summaries, findings.without, findings.problems) == (0, 2, ())
    assert findings.averages.height == 0
    assert findings.samples().height == 0


@pytest.mark.parametrize(
    ("comment", "reason"),
    [
        ("JS1:%%%", "is not base64"),
        ("JS1:aGVsbG8=", "is not gzip"),
        ("JS1:", "is cut short"),
        (pack(node(gpu_utilization={"0": 1}))[:60], "is not base64|is cut short"),
        ("JS1:" + base64.b64encode(gzip.compress(b"{", mtime=0)).decode(), "is not JSON"),
        (pack([1, 2]), "has no nodes"),
        (pack({"nodes": {"n": 7}}), "has no values"),
        ("JS1:" + base64.b64encode(gzip.compress(b" " * (20 << 20), mtime=0)).decode(), "unpacks to more than"),
    ],
)
def test_damaged_summary_is_reported_and_skipped(comment: str, reason: str) -> None:
    """The report is one line with the job and the reason."""
    findings = jobstats.find(jobs(comment, pack(node(gpu_utilization={"0": 1}))))
    assert findings.summaries == 1
    assert len(findings.problems) == 1
    assert findings.problems[0].startswith("job 1: AdminComment ")
    with pytest.raises(jobstats.SummaryError, match=reason):
        jobstats.decode(comment)


def test_summary_of_run_without_end_is_reported() -> None:
    frame = jobs(pack(node(gpu_utilization={"0": 1}))).with_columns(end=pl.lit(None, dtype=JOBS["end"]))
    findings = jobstats.find(frame)
    assert findings.averages.height == 0
    assert "no start or end" in findings.problems[0]


def test_invalid_values_are_not_measurements() -> None:
    """Covers null, text, booleans and negative or huge numbers; a GPU key that is not a number is a name."""
    values = {"0": None, "1": "n/a", "2": True, "3": -1, "4": 0, "GPU-x": 5, "5": 10**400}
    util_pcts = {gpu.gpu: gpu.util_pct for gpu in jobstats.decode(pack(node(gpu_utilization=values))) or ()}
    assert util_pcts == {"4": 0.0, "GPU-x": 5.0}
    assert jobstats.find(jobs(pack(node(gpu_utilization={"GPU-x": 5})))).allocation_gpus()["gpu"].to_list() == ["GPU-x"]


def test_comment_without_js1_prefix_is_rejected() -> None:
    with pytest.raises(jobstats.SummaryError, match="does not start"):
        jobstats.decode("hello")


@given(st.dictionaries(st.from_regex(r"[0-9]{1,2}", fullmatch=True), st.floats(0, 100), max_size=8))
def test_packed_summary_is_decoded_unchanged(values: dict[str, float]) -> None:
    text = jobstats.decode(pack(node(gpu_utilization=values)))
    assert {gpu.gpu: gpu.util_pct for gpu in text or ()} == values


def test_recorded_summaries_are_decoded(shared_data: Path) -> None:
    """One GPU of job 46044267 and all GPUs of job 45352405 have no utilization, which is not 0."""
    recorded = json.loads((shared_data / "jobstats" / "js1_decoded.json").read_text())
    findings = jobstats.find(jobs(*(pack(entry["stats"]) for entry in recorded)))
    rows = findings.averages.select("job_id", "node", "index", "util_pct", "fb_used_mib").rows()
    assert rows == [
        (1, "della-l03g5", 3, None, 875364352 / MIB),
        (2, "della-l05g2", 2, None, 875364352 / MIB),
        (2, "della-l05g2", 3, 9.5, 18230214656 / MIB),
    ]
