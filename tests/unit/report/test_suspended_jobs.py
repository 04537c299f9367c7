"""The section on suspended jobs in the page, the summary and the CSV files; absent if no job was suspended."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from pathlib import Path

import jsonschema
import polars as pl
import pytest
from waste_samples import make_result

from slurm_affinode.analysis.suspensions import SUSPENSIONS, given_back
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.report.given_back_section import section
from slurm_affinode.report.output import csv_files
from slurm_affinode.report.pages import render_report
from slurm_affinode.report.summary import build_summary, to_json

NO_SUSPENSIONS = pl.DataFrame(schema=SUSPENSIONS)

SCHEMA = Path(__file__).resolve().parents[3] / "docs" / "summary.schema.json"
HOUR = 3_600_000


@pytest.fixture
def result():
    made = make_result(20)
    begin = round(made.query.since.timestamp() * 1000)
    entries = [
        LedgerEntry("alpha", 7, 5, begin, user="<script>", account="vision", node="c1", gpus=4, gpu_model="H100",
                    queued_ms=begin + HOUR // 60, restoring_ms=begin + HOUR // 60 + HOUR,
                    restored_ms=begin + HOUR // 60 + HOUR + 2500, restored_node="c2", image_bytes=3 << 30),
        LedgerEntry("alpha", 8, 5, begin, gpus=1, failure="its GPU is busy"),
    ]  # fmt: skip
    frame = given_back(entries, made.query, now=made.query.until + timedelta(days=1))
    return dataclasses.replace(made, suspensions=frame)


def test_page_shows_gpu_hours_given_back(result):
    html = render_report(result, title="t", top=5)
    assert 'id="given-back"' in html
    assert "GPUs given back" in html
    assert "&lt;script&gt;" in html
    made = section(result, 5)
    assert made.lead.startswith("1 idle job was suspended once; their GPUs were free for others for 4")
    assert [card.value for card in made.cards][:2] == ["4", "1"]
    assert "its GPU is busy" in html


def test_job_that_could_not_be_restored_has_given_nothing_back(result):
    """Unless a later restore has succeeded."""
    begin = round(result.query.since.timestamp() * 1000)
    entry = LedgerEntry("alpha", 7, 5, begin, gpus=2, queued_ms=begin, restore_failure="bad size")
    later = dataclasses.replace(entry, job_id=8, restoring_ms=begin + HOUR, restored_ms=begin + HOUR + 10)
    frame = given_back([entry, later], result.query, now=result.query.until)
    assert dict(frame.select("job_id", "gpu_hours_given_back").iter_rows()) == {7: 0.0, 8: 2.0}


def test_hours_given_back_are_unknown_without_gpu_count(result):
    """If the ledger has no number of GPUs or no memory size, the amount given back is unknown, not 0."""
    begin = round(result.query.since.timestamp() * 1000)
    entries = [
        LedgerEntry("alpha", 7, 5, begin, queued_ms=begin, ended_ms=begin + HOUR),
        LedgerEntry("alpha", 8, 5, begin, mode="inplace", parked_ms=begin, restored_ms=begin + HOUR),
    ]
    frame = given_back(entries, result.query, now=result.query.until)
    blind = dataclasses.replace(result, suspensions=frame)
    summary = json.loads(to_json(build_summary(blind)))
    jsonschema.validate(summary, json.loads(SCHEMA.read_text()))
    assert summary["suspensions"]["gpu_hours_given_back"] is None
    assert summary["suspensions"]["gpu_mem_gib_hours"] is None
    lead = section(blind, 5).lead
    assert "1 idle job was suspended once; how many GPU-hours they gave back is unknown." in lead
    assert "1 job slept in place once; how much GPU memory they left to others is unknown." in lead


def test_page_without_suspensions_has_no_section(result):
    for frame in (None, NO_SUSPENSIONS):
        html = render_report(dataclasses.replace(result, suspensions=frame), title="t", top=5)
        assert "given-back" not in html


def test_summary_with_suspensions_matches_its_schema(result):
    summary = json.loads(to_json(build_summary(result)))
    jsonschema.validate(summary, json.loads(SCHEMA.read_text()))
    suspensions = summary["suspensions"]
    assert (suspensions["suspensions"], suspensions["suspensions_failed"], suspensions["gpu_hours_given_back"]) == (
        1,
        1,
        4.0,
    )
    assert (suspensions["restore_s"], suspensions["suspend_s"], suspensions["image_gib"]) == (2.5, 60.0, 3.0)
    assert [row["outcome"] for row in suspensions["list"]] == ["restored", "failed"]


def test_csv_has_every_suspension(result):
    assert csv_files(result)["suspensions.csv"].count(b"\r\n") == 3
    assert "suspensions.csv" not in csv_files(dataclasses.replace(result, suspensions=NO_SUSPENSIONS))
