"""``summary.json`` and the CSV files."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import polars as pl
import pytest
import waste_samples
from server_samples import server_report

from slurm_affinode.analysis.emissions import EmissionFactor
from slurm_affinode.analysis.result import GROUPINGS, WasteResult
from slurm_affinode.analysis.working_hours import HOURS, WorkingTime
from slurm_affinode.base.text import visible
from slurm_affinode.report import output
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
def test_summary_matches_its_schema(
    kind: str, request: pytest.FixtureRequest, validator: jsonschema.Draft202012Validator
) -> None:
    """With and without GPU metrics, and with hostile names."""
    validator.validate(summary_of(request.getfixturevalue(kind)))


def test_working_hours_are_named_with_their_figures(
    result: WasteResult, validator: jsonschema.Draft202012Validator
) -> None:
    """``null`` if hours are not divided by them."""
    assert summary_of(result)["working_hours"] is None
    rows = [("working", 10.0, 5.0, None, None, None, 5.0), ("other", 14.0, 2.0, 1.0, 0.0, 1.0, 0.0)]
    frame = pl.DataFrame(rows, schema=HOURS, orient="row")
    query = replace(result.query, working=WorkingTime((0, 6), 510, 1440))
    summary = summary_of(replace(result, query=query, working_hours=frame))
    validator.validate(summary)
    made = summary["working_hours"]
    assert (made["days"], made["begin"], made["end"]) == (["Monday", "Sunday"], "08:30", "24:00")
    assert [(row["when"], row["gpu_hours_idle"]) for row in made["hours"]] == [("working", None), ("other", 1.0)]


def test_emissions_follow_the_energy(result: WasteResult, validator: jsonschema.Draft202012Validator) -> None:
    """Unknown energy has unknown emissions; a site without a factor has none."""
    assert summary_of(result)["emissions"] is None
    total = {**result.total, "energy_kwh": 10.0, "idle_energy_kwh": None}
    summary = summary_of(replace(result, total=total, emissions=EmissionFactor(400.0, "contract", None)))
    validator.validate(summary)
    assert summary["emissions"] == {
        "grams_per_kwh": 400.0, "pue": None, "source": "contract", "kg_co2e": 4.0, "idle_kg_co2e": None,
    }  # fmt: skip


def test_summary_without_jobs_matches_its_schema(
    samples: ModuleType, validator: jsonschema.Draft202012Validator
) -> None:
    validator.validate(summary_of(samples.empty_result()))


@pytest.mark.parametrize("names", [(), waste_samples.HOSTILE])
def test_summary_with_engines_matches_its_schema(
    result: WasteResult, names: tuple[str, ...], validator: jsonschema.Draft202012Validator
) -> None:
    """The first engines are listed; totals and diagnoses are of all of them."""
    summary = summary_of(replace(result, servers=server_report(names, timelines=2)), top=3)
    validator.validate(summary)
    servers = summary["servers"]
    assert (servers["engines"], len(servers["list"])) == (4, 3)
    assert [item["page"] is None for item in servers["list"]] == [False, False, True]
    assert servers["idle_gpu_hours"] == pytest.approx(119 * 15 / 3600, abs=1e-6)
    assert servers["list"][0]["diagnoses"][-1]["kind"] == "queue-unstable"
    kinds = {diagnosis["kind"]: diagnosis for diagnosis in servers["diagnoses"]}
    assert kinds["idle"]["gib_hours"] == pytest.approx(servers["idle_gib_hours"])


def test_idle_time_on_unknown_gpus_is_not_zero(result: WasteResult, validator: jsonschema.Draft202012Validator) -> None:
    """The only idle engine has unknown GPUs; the others were not idle."""
    report = server_report((), timelines=0)
    engines = tuple(
        replace(engine, idle_gpu_hours=None, idle_gib_hours=None) if engine.idle_gpu_hours else engine
        for engine in report.engines
    )
    assert {engine.idle_gpu_hours for engine in engines} == {None, 0.0}
    summary = summary_of(replace(result, servers=replace(report, engines=engines)))
    validator.validate(summary)
    assert summary["servers"]["idle_gpu_hours"] is None


def test_schema_rejects_unknown_and_missing_keys(
    result: WasteResult, validator: jsonschema.Draft202012Validator
) -> None:
    summary = summary_of(result)
    assert not validator.is_valid({**summary, "extra": 1})
    assert not validator.is_valid({k: v for k, v in summary.items() if k != "total"})


def test_summary_has_totals_and_worst_jobs(result: WasteResult) -> None:
    """The figures are those of the result; times are in UTC, with Z."""
    summary = summary_of(result, top=3)
    assert summary["total"]["gpu_hours_idle"] == pytest.approx(result.total["gpu_hours_idle"])
    assert [j["job_id"] for j in summary["worst_jobs"]] == result.jobs["job_id"].head(3).to_list()
    assert summary["query"]["since"] == "2026-11-01T00:00:00Z"
    assert set(summary["groups"]) == set(GROUPINGS)


def test_unknown_values_are_null(unmeasured: WasteResult) -> None:
    """They are never 0, nor NaN, which JSON does not have."""
    summary = summary_of(unmeasured)
    assert summary["total"]["idle_fraction"] is None
    assert summary["total"]["energy_kwh"] is None
    for row in (summary["total"], *summary["worst_jobs"], *summary["groups"]["user"], *summary["over_time"]["buckets"]):
        assert row["gpu_hours_unknown"] == row["gpu_hours_allocated"] > 0
        assert [row[f"gpu_hours_{state}"] for state in ("idle", "low", "busy")] == [None] * 3
    assert {row["gpu_hours_idle"] for row in read(output.csv_files(unmeasured)["jobs.csv"])} == {""}
    assert {row["windows"] for row in summary["window_histogram"]} == {None}
    frame = unmeasured.jobs.with_columns(util_mean_pct=pl.lit(math.nan))
    object.__setattr__(unmeasured, "jobs", frame)
    assert summary_of(unmeasured)["worst_jobs"][0]["util_mean_pct"] is None


def test_terminal_headline_distinguishes_unknown_from_zero(result: WasteResult, samples: ModuleType) -> None:
    """It has the capacity, the unallocated hours, and the allocated hours in four parts."""
    rows = headline_rows(result)
    assert [r[0] for r in rows] == ["capacity", "not allocated", "allocated", "busy", "low", "idle", "unknown"]
    rows = headline_rows(samples.make_result(measured=False, priced=False))
    assert ("idle", "unknown", "") in rows


def read(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode("utf-8"), newline="")))


def test_csv_files_have_all_rows(result: WasteResult) -> None:
    """They are not limited to the rows shown on the page."""
    files = output.csv_files(result)
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
def test_formula_is_quoted(before: str, start: str) -> None:
    """An apostrophe is prepended even if spaces or invisible characters precede the formula."""
    text = f"{before}{start}1+1"
    assert read(output.to_csv(pl.DataFrame({"name": [text]})))[0]["name"] == "'" + visible(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\tx", "'\\tx"),
        ("line\r\nbreak", "line\\r\\nbreak"),
        ("a\0b", "a\\x00b"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\x9b31m", "\\x9b31m"),
        ("a\u202eb", "a[U+202E]b"),
        ("a\u2028b", "a[U+2028]b"),
    ],
)
def test_character_that_a_terminal_would_interpret_is_made_visible(text: str, shown: str) -> None:
    """A job name is one line of a CSV file, and does nothing to the terminal of a reader."""
    assert read(output.to_csv(pl.DataFrame({"name": [text, None, "x"]})))[0]["name"] == shown


@pytest.mark.parametrize("text", ["plain", " padded", "é=1", "a=b", "a,b", 'say "hi"', "née", "123"])
def test_other_texts_are_unchanged(text: str) -> None:
    """They are quoted if needed."""
    assert read(output.to_csv(pl.DataFrame({"name": [text], "n": [1]})))[0]["name"] == text


def test_numbers_are_unchanged_and_null_is_empty() -> None:
    """A negative number is not taken for a formula."""
    frame = pl.DataFrame({"n": [-1.5, None], "name": [None, "x"]})
    assert read(output.to_csv(frame)) == [{"n": "-1.5", "name": ""}, {"n": "", "name": "x"}]


def test_table_without_text_columns_is_written() -> None:
    assert output.to_csv(pl.DataFrame({"n": [1]})) == b"n\r\n1\r\n"
