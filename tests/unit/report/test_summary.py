"""``summary.json`` and the CSV files."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import polars as pl
import pytest

from slurm_affinode.analysis.result import GROUPINGS, WasteResult
from slurm_affinode.report import export
from slurm_affinode.report.summary import build_summary, headline_rows, to_json

SCHEMA = Path(__file__).resolve().parents[3] / "docs" / "summary.schema.json"


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


def summary_of(result: WasteResult, **options: Any) -> dict[str, Any]:
    loaded = json.loads(to_json(build_summary(result, **options)))
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize("kind", ["result", "hostile", "unmeasured"])
def test_the_summary_is_what_its_schema_says(
    kind: str, request: pytest.FixtureRequest, validator: jsonschema.Draft202012Validator
) -> None:
    """With and without history, with any names."""
    validator.validate(summary_of(request.getfixturevalue(kind)))


def test_the_summary_of_nothing_is_valid(samples: ModuleType, validator: jsonschema.Draft202012Validator) -> None:
    """An interval without jobs."""
    validator.validate(summary_of(samples.empty_result()))


def test_the_schema_refuses_what_the_summary_does_not_have(
    result: WasteResult, validator: jsonschema.Draft202012Validator
) -> None:
    """A key that is misspelt or missing is found."""
    summary = summary_of(result)
    assert not validator.is_valid({**summary, "extra": 1})
    assert not validator.is_valid({k: v for k, v in summary.items() if k != "total"})


def test_the_summary_has_the_totals_and_the_worst_jobs(result: WasteResult) -> None:
    """Same figures as the result; times in UTC with Z."""
    summary = summary_of(result, top=3)
    assert summary["total"]["gpu_hours_idle"] == pytest.approx(result.total["gpu_hours_idle"])
    assert [j["job_id"] for j in summary["worst_jobs"]] == result.jobs["job_id"].head(3).to_list()
    assert summary["query"]["since"] == "2026-11-01T00:00:00Z"
    assert set(summary["groups"]) == set(GROUPINGS)


def test_what_is_unknown_is_null(unmeasured: WasteResult) -> None:
    """Never 0 for a share, nor NaN, which JSON has not."""
    summary = summary_of(unmeasured)
    assert summary["total"]["idle_fraction"] is None
    assert summary["total"]["energy_kwh"] is None
    for row in (summary["total"], *summary["worst_jobs"], *summary["groups"]["user"], *summary["over_time"]["buckets"]):
        assert row["gpu_hours_unknown"] == row["gpu_hours_allocated"] > 0
        assert [row[f"gpu_hours_{state}"] for state in ("idle", "low", "busy")] == [None] * 3
    assert {row["gpu_hours_idle"] for row in read(export.csv_files(unmeasured)["jobs.csv"])} == {""}
    assert {row["windows"] for row in summary["window_histogram"]} == {None}
    frame = unmeasured.jobs.with_columns(util_mean_pct=pl.lit(math.nan))
    object.__setattr__(unmeasured, "jobs", frame)
    assert summary_of(unmeasured)["worst_jobs"][0]["util_mean_pct"] is None


def test_the_headline_for_a_terminal_tells_unknown_from_zero(result: WasteResult, samples: ModuleType) -> None:
    """What there was, what of it was not allocated, and the allocated hours with their four parts."""
    rows = headline_rows(result)
    assert [r[0] for r in rows] == ["capacity", "not allocated", "allocated", "busy", "low", "idle", "unknown"]
    rows = headline_rows(samples.make_result(measured=False, priced=False))
    assert ("idle", "unknown", "") in rows


def read(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode("utf-8"), newline="")))


def test_csv_files_hold_every_row(result: WasteResult) -> None:
    """Not only those that the page shows."""
    files = export.csv_files(result)
    assert {"jobs.csv", "users.csv", "accounts.csv", "partitions.csv", "qos.csv", "nodes.csv", "gpu_models.csv",
            "clusters.csv", "over_time.csv"} == set(files)  # fmt: skip
    rows = read(files["jobs.csv"])
    assert len(rows) == result.jobs.height
    assert rows[0]["start"].endswith("Z")
    assert float(rows[0]["gpu_hours_idle"]) == pytest.approx(result.jobs["gpu_hours_idle"][0])


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "＝", "＋", "－", "＠", "﹦", "−"])
@pytest.mark.parametrize(
    "before",
    [
        "",
        " ",
        "  ",
        "\t",
        "\r",
        "\n",
        "\v",
        "\ufeff",
        "\ufeff ",
        "\u200b",
        "\xa0",
        "\u3000",
        "\x01",
        "\x1b \u2028",
        "\xad",
    ],
)
def test_formula_is_defused(before: str, start: str) -> None:
    """An apostrophe goes in front, also where spaces or invisible characters hide the formula."""
    text = f"{before}{start}1+1"
    assert read(export.to_csv(pl.DataFrame({"name": [text]})))[0]["name"] == "'" + text


@pytest.mark.parametrize("text", ["\tx", "\rx", "\nx"])
def test_leading_tab_or_line_end_is_defused(text: str) -> None:
    """What follows it may become a cell of its own."""
    assert read(export.to_csv(pl.DataFrame({"name": [text]})))[0]["name"] == "'" + text


@pytest.mark.parametrize("text", ["plain", " padded", "é=1", "a=b", "a,b", 'say "hi"', "line\nbreak", "née", "123"])
def test_other_texts_come_back_as_they_are(text: str) -> None:
    """Quoted where need be."""
    assert read(export.to_csv(pl.DataFrame({"name": [text], "n": [1]})))[0]["name"] == text


def test_numbers_are_not_changed_and_unknown_is_empty() -> None:
    """A negative number is a number; null is an empty field."""
    frame = pl.DataFrame({"n": [-1.5, None], "name": [None, "x"]})
    assert read(export.to_csv(frame)) == [{"n": "-1.5", "name": ""}, {"n": "", "name": "x"}]


def test_a_table_without_texts_can_be_written() -> None:
    """No text column, nothing to guard."""
    assert export.to_csv(pl.DataFrame({"n": [1]})) == b"n\r\n1\r\n"


def test_a_nul_character_does_not_end_the_file() -> None:
    """Readers stop at it."""
    assert b"\0" not in export.to_csv(pl.DataFrame({"name": ["a\0b"]}))
