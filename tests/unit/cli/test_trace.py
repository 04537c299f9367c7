"""``slurm-affinode trace``: figures, files and errors."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import shutil
import sqlite3
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import polars as pl
import pytest
from click.testing import CliRunner, Result

from slurm_affinode.analysis import waste
from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.cli.main import cli
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.slurm.accounting import sacct
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, empty
from slurm_affinode.traces.fleet import ServingSummary

REPOSITORY = Path(__file__).resolve().parents[3]
SPECIFIED = (
    "samples", "devices", "joined_samples", "sample_step_s", "idle_sample_fraction", "above_50pct_sample_fraction",
    "utilization_mean_pct", "utilization_median_pct", "memory_time_gb_h", "idle_memory_time_gb_h",
    "idle_memory_fraction", "idle_memory_fraction_per_device", "memory_idle_over_busy",
    "device_idle_fraction_percentiles", "mean_concurrently_idle_memory_tb", "requests", "requests_without_lora",
    "exec_time_median_s", "exec_time_p99_s", "base_models", "lora_adapters", "popularity_gini",
    "popularity_top5pct_share", "load_latency_mean_s",
)  # fmt: skip
METRIC_HEADER = "timestamp_anon,value,container_ip\n"


def run(*words: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["trace", *map(str, words)], input=stdin)


def check_schema(summary: dict[str, Any], name: str = "trace-summary.schema.json") -> None:
    schema = json.loads((REPOSITORY / "docs" / name).read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(summary, schema)


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """A synthetic trace of two pods, one request and one load; one table is an archive with an AppleDouble file."""
    directory = tmp_path / "trace"
    directory.mkdir()
    (directory / "pod_gpu_duty_cycle_anon.csv").write_text(
        "value,timestamp_anon,container_ip\n" + "".join(f"{v},{57 * i}.0,{p}\n" for i in range(4) for p, v in PODS)
    )
    memory = (METRIC_HEADER + "".join(f"{57 * i}.0,2e9,{p}\n" for i in range(4) for p, _ in PODS)).encode()
    with tarfile.open(directory / "pod_gpu_memory_used_bytes_anon.tar.gz", "w:gz") as archive:
        for name, data in (("._pod_gpu_memory_used_bytes_anon.csv", b"\x00\x05"),
                           ("pod_gpu_memory_used_bytes_anon.csv", memory)):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    (directory / "data_trace_processed.csv").write_text(
        "exec_time_seconds,checkpoint_model_version_id,lora_args\n4.0,<script>alert(1)</script>,[]\n"
    )
    (directory / "lora_update_latency_anon.csv").write_text(METRIC_HEADER + "0.0,1500,a\n")
    return directory


PODS = (("a", 0.0), ("b", 80.0))


def test_gentd26_writes_a_page_and_a_summary(fleet: Path, tmp_path: Path) -> None:
    """The figures are printed, and names are escaped in the page."""
    out = tmp_path / "out"
    done = run("gentd26", fleet, "--out", out)
    assert done.exit_code == 0, done.output
    summary = json.loads((out / "summary.json").read_text())
    check_schema(summary)
    assert summary["samples"] == 8
    assert summary["sample_step_s"] == 57
    assert summary["idle_memory_fraction"] == 0.5
    assert summary["load_latency_mean_s"] == {"base_model": None, "lora": 1.5, "controlnet": None, "pipeline": None}
    assert "idle_memory_fraction" in done.output
    assert "load_latency_mean_s.base_model" in done.output
    page = (out / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", page)
    assert "Not borne out" in page


def test_summary_has_specified_keys_and_matches_schema(fleet: Path) -> None:
    """The schema and the dataclass have the same figures."""
    done = run("gentd26", fleet, "--json")
    assert done.exit_code == 0
    summary = json.loads(done.stdout)
    check_schema(summary)
    assert set(SPECIFIED) <= set(summary)
    assert set(summary["device_idle_fraction_percentiles"]) == {"p25", "p50", "p75", "p90"}
    schema = json.loads((REPOSITORY / "docs" / "trace-summary.schema.json").read_text())
    assert set(schema["properties"]) == {"trace", "published", "notes", *ServingSummary().as_dict()}


@pytest.mark.parametrize(
    "name",
    ["pod_gpu_duty_cycle_anon.csv", "pod_gpu_memory_used_bytes_anon.tar.gz", "data_trace_processed.csv",
     "lora_update_latency_anon.csv"],
)  # fmt: skip
def test_missing_table_makes_its_figures_unknown(fleet: Path, tmp_path: Path, name: str) -> None:
    """The other figures are computed; the page names the missing table."""
    (fleet / name).unlink()
    done = run("gentd26", fleet, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    check_schema(summary)
    assert any("does not exist" in note for note in summary["notes"])
    assert "unknown" in done.output
    if "lora" not in name:
        assert any(claim["verdict"] == "unknown" for claim in summary["published"])


def test_damaged_archive_leaves_no_output(fleet: Path, tmp_path: Path) -> None:
    archive = fleet / "pod_gpu_memory_used_bytes_anon.tar.gz"
    archive.write_bytes(archive.read_bytes()[:100])
    done = run("gentd26", fleet, "--out", tmp_path / "out")
    assert isinstance(done.exception, AffinodeError)
    assert done.exception.exit_code == 2
    assert "damaged or cut short" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_unwritable_output_directory_is_reported(fleet: Path) -> None:
    done = run("gentd26", fleet, "--out", fleet / "data_trace_processed.csv" / "x")
    assert isinstance(done.exception, AffinodeError)
    assert "data_trace_processed.csv" in str(done.exception)


def test_published_trace_in_archives_and_unpacked(shared_data: Path, tmp_path: Path) -> None:
    """The archives as published and a partly unpacked copy give the same summary."""
    source = shared_data / "gentd26"
    mixed = tmp_path / "mixed"
    (mixed / "sub").mkdir(parents=True)
    for archive in sorted(source.glob("*.tar.gz")):
        if archive.name.startswith(("pod_gpu", "lora", "data")):
            with tarfile.open(archive) as members:
                for member in members:
                    data = members.extractfile(member)
                    assert data is not None
                    (mixed / "sub" / Path(member.name).name).write_bytes(data.read())
        else:
            shutil.copy(archive, mixed)
    whole, other = run("gentd26", source, "--json"), run("gentd26", mixed, "--json")
    assert whole.exit_code == other.exit_code == 0
    assert json.loads(whole.stdout) == json.loads(other.stdout)
    summary = json.loads(whole.stdout)
    check_schema(summary)
    assert None not in [summary[key] for key in SPECIFIED]


def test_page_of_the_published_trace(shared_data: Path, tmp_path: Path) -> None:
    """Every finding has a section, every published statement a verdict."""
    done = run("gentd26", shared_data / "gentd26", "--out", tmp_path)
    assert done.exit_code == 0
    page = (tmp_path / "report.html").read_text()
    for key in ("idle", "memory", "devices", "fleet", "popularity", "load", "requests", "recipes"):
        assert f'<section id="{key}"' in page
    published = json.loads((tmp_path / "summary.json").read_text())["published"]
    assert page.count("Borne out:") == sum(claim["verdict"] == "borne-out" for claim in published)
    assert page.count("Not borne out:") == 6
    assert page.count("Unknown:") == 1


def database(path: Path, *jobs: tuple[int, int, float | None]) -> Path:
    """Create a job table: (job ID, seconds, average utilization), one GPU each, consecutive on one node."""
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE job (job_id, cluster, start_time, duration, num_acc, resources, footprint)")
    at = 1_700_000_000
    for job, seconds, util in jobs:
        resources = json.dumps([{"hostname": "n1", "accelerators": ["00000000:01:00.0"]}])
        footprint = None if util is None else json.dumps({"acc_utilization_avg": util, "acc_mem_used_avg": 1024})
        connection.execute("INSERT INTO job VALUES (?,?,?,?,?,?,?)", [job, "c", at, seconds, 1, resources, footprint])
        at += seconds + 5
    connection.commit()
    connection.close()
    return path


def test_clustercockpit_jobs_are_classified_by_average(tmp_path: Path) -> None:
    """An average of 0 is idle, a missing one unknown, any other busy or low; the page calls it a lower bound."""
    path = database(tmp_path / "job.db", (1, 3600, 0.0), (2, 7200, 60.0), (3, 1800, None), (4, 900, 3.0))
    out = tmp_path / "out"
    done = run("clustercockpit", path, "--out", out)
    assert done.exit_code == 0, done.output
    summary = json.loads((out / "summary.json").read_text())
    check_schema(summary, "summary.schema.json")
    total = summary["total"]
    assert total["gpu_hours_allocated"] == pytest.approx(3.75)
    assert total["gpu_hours_idle"] == pytest.approx(1)
    assert total["gpu_hours_busy"] == pytest.approx(2)
    assert total["gpu_hours_low"] == pytest.approx(0.25)
    assert total["gpu_hours_unknown"] == pytest.approx(0.5)
    assert total["mem_gib_h"] == pytest.approx(3.25)
    assert total["unallocated_gpu_hours"] is None
    assert "lower bound" in (out / "report.html").read_text()
    assert "At least 1" in (out / "report.html").read_text()
    assert "averages per job" in (out / "report.html").read_text()
    assert "lower bound" in done.output
    assert {"idle, at least", "busy, at most"} <= {line.split("  ")[0].strip() for line in done.output.splitlines()}


def test_clustercockpit_without_gpu_hours_or_jobs(tmp_path: Path) -> None:
    """Jobs of zero length give an empty report; a table without jobs is an error."""
    done = run("clustercockpit", database(tmp_path / "zero.db", (1, 0, 5.0)), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["total"]["gpu_hours_allocated"] == 0
    done = run("clustercockpit", database(tmp_path / "none.db"))
    assert isinstance(done.exception, AffinodeError)


def test_published_jobs_of_clustercockpit(shared_data: Path) -> None:
    """303 GPU jobs, 94 of them at 0 %, and 3,980 GPU-hours, all of them measured."""
    done = run("clustercockpit", shared_data / "clustercockpit" / "jobs.sqlite", "--json")
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary["source"] == {
        "trace": "clustercockpit", "jobs": 544, "gpu_jobs": 303, "zero_utilization_gpu_jobs": 94,
    }  # fmt: skip
    assert summary["total"]["jobs"] == 303
    assert round(summary["total"]["gpu_hours_allocated"]) == 3980
    assert summary["total"]["gpu_hours_unknown"] == pytest.approx(0, abs=1e-6)
    assert summary["quality"]["mapped_runs"]["recorded"] == 303
    assert {group["name"] for group in summary["groups"]["gpu_model"]} == {"NVIDIA A40", "NVIDIA A100", None}
    wholly_idle = [row for row in summary["idle_fraction_histogram"] if row["upper"] == 1.0]
    assert wholly_idle[0]["jobs"] == 94


def recorded_js1(shared_data: Path) -> str:
    """Return the recorded attempts in the format of sacct, with their summaries packed as jobstats packs them."""
    lines = ["Cluster|JobID|User|State|Start|End|Elapsed|NNodes|NodeList|AllocTRES|AdminComment|JobName"]
    for entry in json.loads((shared_data / "jobstats" / "js1_decoded.json").read_text()):
        _, _, elapsed, job, _, _, nodes, _, state, _, _ = entry["sacct"].split("|")
        packed = base64.b64encode(gzip.compress(json.dumps(entry["stats"]).encode())).decode()
        start = datetime(2023, 3, 1, tzinfo=UTC)
        hours, minutes, seconds = map(int, elapsed.split(":"))
        end = datetime.fromtimestamp(start.timestamp() + hours * 3600 + minutes * 60 + seconds, UTC)
        node = ",".join(entry["stats"]["nodes"])
        lines.append(
            f"della|{job}|u|{state}|{start:%Y-%m-%dT%H:%M:%S}|{end:%Y-%m-%dT%H:%M:%S}|{elapsed}|{nodes}|{node}|"
            f"gres/gpu={entry['stats']['gpus']}|JS1:{packed}|train"
        )
    return "\n".join(lines) + "\n"


def test_jobstats_summaries_are_classified(shared_data: Path) -> None:
    """Two recorded attempts with three GPUs, one with a utilization; the others are unknown, not idle."""
    done = run("jobstats", "-", "--timezone", "UTC", "--json", stdin=recorded_js1(shared_data))
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    check_schema(summary, "summary.schema.json")
    assert summary["source"]["summaries"] == 2
    hours = {"45352405": 27738 / 3600, "46044267": 83124 / 3600}
    total = summary["total"]
    assert total["gpu_hours_allocated"] == pytest.approx(hours["45352405"] + 2 * hours["46044267"])
    assert total["gpu_hours_busy"] == pytest.approx(hours["46044267"])
    assert total["gpu_hours_unknown"] == pytest.approx(hours["45352405"] + hours["46044267"])
    assert total["gpu_hours_idle"] == 0
    assert total["util_mean_pct"] == pytest.approx(9.5)
    rows = {row["job_id"]: row for row in summary["worst_jobs"]}
    assert rows[45352405]["idle_fraction"] is None


def test_jobstats_without_summaries_is_an_error(tmp_path: Path) -> None:
    """The hint names the missing column."""
    path = tmp_path / "sacct.txt"
    path.write_text("JobID|Start|End|State|AllocTRES\n1|2023-03-01T00:00:00|2023-03-01T01:00:00|COMPLETED|gres/gpu=1\n")
    done = run("jobstats", path, "--timezone", "UTC")
    assert isinstance(done.exception, AffinodeError)
    assert "no jobstats summary" in str(done.exception)
    assert "AdminComment" in str(done.exception.hint)


def test_jobstats_markers_without_data_are_unknown(tmp_path: Path) -> None:
    """The GPU-hours of ``JS1:Short`` and ``JS1:None`` are unknown; a damaged summary is reported."""
    path = tmp_path / "sacct.txt"
    rows = [
        f"{job}|2023-03-01T0{job}:00:00|2023-03-01T0{job}:30:00|COMPLETED|gres/gpu=1|{comment}|j"
        for job, comment in enumerate(("JS1:Short", "JS1:None", "JS1:%%%"), start=1)
    ]
    path.write_text("\n".join(["JobID|Start|End|State|AllocTRES|AdminComment|JobName", *rows]) + "\n")
    done = run("jobstats", path, "--timezone", "UTC", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    total = json.loads((tmp_path / "out" / "summary.json").read_text())["total"]
    assert total["gpu_hours_unknown"] == total["gpu_hours_allocated"] == 1.5
    assert "job 3: AdminComment is not base64" in done.output


def test_real_accounting_without_gpu_history(shared_data: Path, tmp_path: Path) -> None:
    """294 allocations, 84 with GPUs; all 39.0 GPU-hours are unknown, none idle."""
    accounting = sacct.read(shared_data / "jobanalyzer" / "sacct_p.txt")
    jobs = accounting.jobs
    assert jobs.height == 294
    first, last = jobs["start"].min(), jobs["end"].max()
    assert isinstance(first, datetime)
    assert isinstance(last, datetime)
    result = waste.analyse(
        WasteQuery(first, last), jobs, empty(ALLOCATION_GPUS), SampleStore(tmp_path / "none"), now=last
    )
    assert result.total["jobs"] == 84
    assert round(result.total["gpu_hours_allocated"] or 0, 1) == 39.0
    assert result.total["gpu_hours_unknown"] == pytest.approx(result.total["gpu_hours_allocated"])
    assert result.total["gpu_hours_idle"] is None
    assert result.total["gpu_hours_measured"] == 0
    assert result.jobs.select(pl.col("mapping").unique()).to_series().to_list() == ["unknown"]


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.5,3180,8
x,1,1
"""


def test_requests_are_analyzed_and_bad_rows_reported(tmp_path: Path) -> None:
    """Figures on the screen, a page, a summary, and a warning with the line."""
    path = tmp_path / "code.csv"
    path.write_text(AZURE)
    result = CliRunner().invoke(cli, ["trace", "azure", str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "context.mean" in result.output
    assert "line 4" in result.output
    assert str(tmp_path / "out" / "report.html") in result.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["files"][0]["context"]["sum"] == 7988
    assert summary["files"][0]["modeled"]["monolithic"]["completed"] == 2
    assert "Requests of language models" in (tmp_path / "out" / "report.html").read_text()


def test_directory_of_request_traces_is_analyzed(tmp_path: Path) -> None:
    """Its CSV files, plain and compressed, in subdirectories too; other files are left out."""
    directory = tmp_path / "traces" / "2024"
    directory.mkdir(parents=True)
    (directory.parent / "code.csv").write_text(AZURE)
    (directory / "conv.csv.gz").write_bytes(gzip.compress(AZURE.encode()))
    (directory / "README.md").write_text("about\n")
    (directory / "._conv.csv").write_text("attributes\n")
    result = CliRunner().invoke(cli, ["trace", "azure", str(directory.parent), "--json"])
    assert [row["name"] for row in json.loads(result.stdout)["files"]] == ["conv", "code"]
    (tmp_path / "empty").mkdir()
    refused = CliRunner().invoke(cli, ["trace", "azure", str(tmp_path / "empty")])
    assert refused.exit_code != 0
    assert "no CSV file" in str(refused.exception) + refused.output


def test_parameters_of_the_engine_matter(tmp_path: Path) -> None:
    """A KV cache below one request: nothing fits."""
    path = tmp_path / "code.csv"
    path.write_text(AZURE)
    result = CliRunner().invoke(cli, ["trace", "azure", str(path), "--kv-tokens", "4000", "--json"])
    row = json.loads(result.stdout)["files"][0]["modeled"]
    assert (row["monolithic"]["never_fits"], row["engine"]["kv_tokens"]) == (1, 4000)


@pytest.mark.parametrize("option", ["--iteration-ms", "--request-us", "--prefill-us"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_times_of_the_engine_that_are_no_numbers_are_usage_errors(tmp_path: Path, option: str, value: str) -> None:
    path = tmp_path / "code.csv"
    path.write_text(AZURE)
    result = CliRunner().invoke(cli, ["trace", "azure", str(path), option, value])
    assert (result.exit_code, option in result.output) == (2, True), result.output
