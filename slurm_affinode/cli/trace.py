"""``slurm-affinode trace``: public traces, and per-job averages of other monitoring systems."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import polars as pl

from slurm_affinode.analysis import prices
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.base import config
from slurm_affinode.base.errors import InputError
from slurm_affinode.cli.command import group
from slurm_affinode.cli.engine_options import default_texts, engine_of, engine_options
from slurm_affinode.cli.options import echo, json_option, print_json, print_table, progress, warn
from slurm_affinode.metrics.averages import NOTE
from slurm_affinode.metrics.readers import clustercockpit as cockpit
from slurm_affinode.metrics.readers import jobstats as summaries
from slurm_affinode.pipeline import averages, report
from slurm_affinode.report.output import DEFAULT_TOP, write_files
from slurm_affinode.report.pages import render_report
from slurm_affinode.report.summary import Summary, build_summary, headline_rows, to_json
from slurm_affinode.slurm import times
from slurm_affinode.slurm.accounting import sacct
from slurm_affinode.slurm.accounting.sacct import SacctReading
from slurm_affinode.slurm.accounting.schema import JOBS, conform
from slurm_affinode.traces.engine_model import EngineModel

if TYPE_CHECKING:
    from slurm_affinode.traces.instances import InstanceLog
    from slurm_affinode.traces.job_log import JobLog


def write_outputs(out: Path, html: str, summary: Summary) -> None:
    """Write ``report.html`` and ``summary.json`` into ``out``. Raises ``AffinodeError`` if that fails."""
    write_files(out, {"report.html": html.encode(), "summary.json": to_json(summary).encode()})


_EPILOG = """\b
Examples:
  slurm-affinode trace gentd26 cluster-trace-v2026-GenAI/ --out out/gentd26
  slurm-affinode trace clustercockpit /var/lib/cc-backend/job.db --out out/cc
  sacct -aP -o Cluster,JobID,JobIDRaw,User,Account,Partition,State,Submit,Start,End,\\
      Elapsed,NNodes,NodeList,AllocTRES,AdminComment,JobName | slurm-affinode trace jobstats -
"""


@group(epilog=_EPILOG)
def trace() -> None:
    """Analyze a public trace, or per-job averages of another monitoring system."""


out_option = click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Write report.html and summary.json to DIR [default: only print figures]",
)  # fmt: skip


@trace.command("gentd26", short_help="Analyze the Alibaba GenAI serving trace 2026")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@out_option
@json_option
def gentd26(paths: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Analyze the Alibaba GenAI serving trace 2026 (GenTD26).

    PATH is the directory with the published archives, the extracted CSV files, or both; single files may be named
    too. Figures of missing tables are unknown. Every figure is computed from the files and compared with the
    published statements.

    \b
    Example:
      slurm-affinode trace gentd26 cluster-trace-v2026-GenAI/ --out out/gentd26
    """
    from slurm_affinode.traces import claims, fleet, fleet_page  # noqa: PLC0415 - --help stays quick
    from slurm_affinode.traces import gentd26 as reader  # noqa: PLC0415

    with progress("files", total=None) as advance:
        tables = reader.read(paths, on_file=lambda _: advance(1))
        result = fleet.analyse(tables)
    judged = claims.judge(claims.load("gentd26"), result.summary.as_dict())
    summary: dict[str, Any] = {
        "trace": "gentd26",
        **result.summary.as_dict(),
        "published": [claim.as_dict() for claim in judged],
        "notes": list(result.notes),
    }
    _present(summary, judged, lambda: fleet_page.html(result, judged), out=out, as_json=as_json)


def _present(
    summary: Summary, judged: Sequence[Any], page: Callable[[], str], *, out: Path | None, as_json: bool
) -> None:
    """Write the files, then output the figures, the published statements and the notes."""
    if out is not None:
        write_outputs(out, page(), summary)
    if as_json:
        print_json(summary)
        return
    print_table(("figure", "value"), _figures(summary), right=("value",))
    if judged:
        echo()
        print_table(("published", "the data", "verdict"), [_claim(claim) for claim in judged])
    for note in summary["notes"]:
        warn(f"note: {note}")
    if out is not None:
        echo("", f"report   {out / 'report.html'}", f"summary  {out / 'summary.json'}")


def _figures(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    from slurm_affinode.traces.claims import flat  # noqa: PLC0415 - --help stays quick

    return [(key, _plain(value)) for key, value in flat(summary).items() if not isinstance(value, str)]


def _plain(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}".rstrip("0").rstrip(".")


def _claim(claim: Any) -> tuple[str, str, str]:
    if claim.computed is None:
        return claim.text, "unknown", claim.verdict
    digits = claim.decimals if claim.computed == round(claim.computed) else claim.decimals + 1
    return claim.text, f"{claim.computed:,.{digits}f} {claim.unit}", claim.verdict


@trace.command("swf", short_help="Analyze a log of the Parallel Workloads Archive (SWF)")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@out_option
@json_option
def swf(file: Path, out: Path | None, as_json: bool) -> None:
    """Analyze a log in the Standard Workload Format (Parallel Workloads Archive).

    FILE is the log, plain or compressed. Sizes, run times, recorded waits, requested against used time and arrivals
    are computed; jobs without a size or a run time are left out and listed.

    \b
    Example:
      slurm-affinode trace swf KTH-SP2-1996-2.swf.gz --out out/kth
    """
    from slurm_affinode.traces import swf as reader  # noqa: PLC0415 - --help stays quick

    _job_log("swf", reader.read(file), claims_name=None, out=out, as_json=as_json)


@trace.command("site", short_help="Analyze a data set of export trace")
@click.argument("path", metavar="DIR", type=click.Path(path_type=Path))
@out_option
@json_option
def site(path: Path, out: Path | None, as_json: bool) -> None:
    """Analyze an anonymized data set that export trace has written.

    DIR has manifest.json and the tables; they are verified by their digests. The figures of the jobs are those of
    trace swf DIR/jobs.swf; idle windows, the queue, and waits by priority class are added.

    \b
    Example:
      slurm-affinode trace site dataset/ --out out/site
    """
    from slurm_affinode.traces import job_figures, site_page, site_trace  # noqa: PLC0415 - --help stays quick

    data = site_trace.read(path)
    jobs, idle = job_figures.analyse(site_trace.job_log(data)), site_trace.idle_figures(data)
    classes = site_trace.priority_classes(data)
    by_class = None if classes is None else {name: dataclasses.asdict(figures) for name, figures in classes.items()}
    summary = {
        "trace": "site", **jobs.as_dict(), "idle": dataclasses.asdict(idle), "priority_classes": by_class,
        "published": [], "notes": [],
    }  # fmt: skip
    _present(summary, (), lambda: site_page.html(data, jobs, idle, classes), out=out, as_json=as_json)


@trace.command("philly", short_help="Analyze the jobs of Microsoft's Philly cluster")
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@out_option
@json_option
def philly(path: Path, out: Path | None, as_json: bool) -> None:
    """Analyze the jobs of the Philly trace, as published or as the artifact of Pollux has them.

    PATH is cluster_job_log, plain or compressed, or its directory; the GPUs of the cluster are read from
    cluster_machine_list there. It can also be the CSV file of Pollux with timestamp, duration, num_gpus and cluster:
    a part of the trace, without waits and final states. Figures published about the whole are compared with either.

    \b
    Example:
      slurm-affinode trace philly trace-data/ --out out/philly
      slurm-affinode trace philly philly.csv.gz --out out/philly
    """
    from slurm_affinode.traces import philly as reader  # noqa: PLC0415 - --help stays quick

    log = reader.read(path)
    part = log.final_states is None
    _job_log("philly", log, claims_name="philly" if part else "philly_log", page_name=None if part else "philly-log",
             out=out, as_json=as_json)  # fmt: skip


@trace.command("helios", short_help="Analyze the jobs of a cluster of SenseTime's Helios")
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@out_option
@json_option
def helios(path: Path, out: Path | None, as_json: bool) -> None:
    """Analyze the jobs of one cluster of the Helios trace (HeliosData).

    PATH is cluster_log.csv, plain or compressed, or its directory. The GPUs of the cluster are read from
    cluster_gpu_number.csv in the same directory. Figures published about the cluster (Venus, Earth, Saturn, Uranus, by
    the name of the directory) are compared with the log.

    \b
    Example:
      slurm-affinode trace helios HeliosData/data/Venus --out out/venus
    """
    from slurm_affinode.traces import scheduler_logs  # noqa: PLC0415 - --help stays quick

    _job_log("helios", scheduler_logs.read_helios(path), claims_name="helios", out=out, as_json=as_json)


@trace.command("acme", short_help="Analyze the jobs of a cluster of the Acme trace")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@out_option
@json_option
def acme(file: Path, out: Path | None, as_json: bool) -> None:
    """Analyze the jobs of one cluster of the Acme trace (AcmeTrace).

    FILE is trace_seren.csv or trace_kalos.csv, plain or compressed. Run times are end minus start. Figures published
    about the cluster, by the name of the file, are compared with the log.

    \b
    Example:
      slurm-affinode trace acme AcmeTrace/data/job_trace/trace_seren.csv --out out/seren
    """
    from slurm_affinode.traces import scheduler_logs  # noqa: PLC0415 - --help stays quick

    _job_log("acme", scheduler_logs.read_acme(file), claims_name="acme", out=out, as_json=as_json)


@trace.command("dlrm2025", short_help="Analyze Alibaba's disaggregated recommendation models (2025)")
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@out_option
@json_option
def dlrm2025(path: Path, out: Path | None, as_json: bool) -> None:
    """Analyze the Alibaba trace of disaggregated recommendation models (cluster-trace-gpu-v2025).

    PATH is disaggregated_DLRM_trace.csv, plain or compressed, or its directory. Instances by role, waits, lives and
    requests are computed; instances that the window of the trace cuts off are counted.

    \b
    Example:
      slurm-affinode trace dlrm2025 cluster-trace-gpu-v2025/ --out out/dlrm
    """
    from slurm_affinode.traces import alibaba_instances  # noqa: PLC0415 - --help stays quick

    _instance_log("dlrm2025", alibaba_instances.read_dlrm2025(path), out=out, as_json=as_json)


@trace.command("pai2023", short_help="Analyze Alibaba's pods that share GPUs (2023)")
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@out_option
@json_option
def pai2023(path: Path, out: Path | None, as_json: bool) -> None:
    """Analyze the Alibaba trace of shared GPUs (cluster-trace-gpu-v2023).

    PATH is a list of pods (openb_pod_list_*.csv), or the directory with the default one. The GPUs of the cluster are
    read from openb_node_list_all_node.csv in the same directory; without it, they are unknown.

    \b
    Example:
      slurm-affinode trace pai2023 cluster-trace-gpu-v2023/ --out out/pai
    """
    from slurm_affinode.traces import alibaba_instances  # noqa: PLC0415 - --help stays quick

    _instance_log("pai2023", alibaba_instances.read_pai2023(path), out=out, as_json=as_json)


@trace.command("pai2020", short_help="Analyze Alibaba's PAI trace (2020): planned and used GPUs")
@click.argument("path", metavar="DIR", type=click.Path(path_type=Path))
@out_option
@json_option
def pai2020(path: Path, out: Path | None, as_json: bool) -> None:
    """Analyze the Alibaba PAI trace (cluster-trace-gpu-v2020): planned and used GPUs, idle time, waits.

    DIR is the directory with pai_job_table, pai_task_table, pai_sensor_table and pai_machine_spec, each as the
    published archive (.tar.gz) or as CSV, with their header files. Figures of missing tables are unknown.

    \b
    Example:
      slurm-affinode trace pai2020 cluster-trace-gpu-v2020/data/ --out out/pai2020
    """
    from slurm_affinode.traces import claims, pai_page  # noqa: PLC0415 - --help stays quick
    from slurm_affinode.traces import pai2020 as reader  # noqa: PLC0415

    tables = reader.read(path)
    result = reader.analyse(tables)
    figures = result.as_dict()
    judged = claims.judge(claims.load("pai2020"), claims.flat(figures))
    summary = {
        "trace": "pai2020", **figures, "published": [claim.as_dict() for claim in judged],
        "notes": list(pai_page.notes(tables.missing)),
    }  # fmt: skip
    _present(summary, judged, lambda: pai_page.html(result, judged, tables.missing), out=out, as_json=as_json)


@trace.command("spot2026", short_help="Analyze Alibaba's spot GPU trace (2026)")
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@out_option
@json_option
def spot2026(path: Path, out: Path | None, as_json: bool) -> None:
    """Analyze the Alibaba trace of spot GPUs (cluster-trace-v2026-spot-gpu): demand against capacity.

    PATH is the directory with node_info_df.csv and job_info_df.csv. Without the list of jobs, which the repository
    lacks, the GPUs by model are computed and the demand is unknown.

    \b
    Example:
      slurm-affinode trace spot2026 cluster-trace-v2026-spot-gpu/ --out out/spot
    """
    from slurm_affinode.traces import claims, spot_page  # noqa: PLC0415 - --help stays quick
    from slurm_affinode.traces import spot2026 as reader  # noqa: PLC0415

    result = reader.analyse(reader.read(path))
    figures = result.summary.as_dict()
    judged = claims.judge(claims.load("spot2026"), claims.flat(figures))
    summary = {
        "trace": "spot2026", **figures, "published": [claim.as_dict() for claim in judged],
        "notes": list(spot_page.notes(result.summary)),
    }  # fmt: skip
    _present(summary, judged, lambda: spot_page.html(result, judged), out=out, as_json=as_json)


@trace.command("asi2026", short_help="Analyze Alibaba's GPU trace of training and inference (2026)")
@click.argument("path", metavar="DIR", type=click.Path(path_type=Path))
@out_option
@json_option
def asi2026(path: Path, out: Path | None, as_json: bool) -> None:
    """Analyze the Alibaba GPU trace of 2026 (cluster-trace-gpu-v2026, ASI): requested and idle GPU-hours, delays.

    DIR has the unpacked tables asi_opensource_job_execution_summary, asi_opensource_pod_hourly and
    asi_opensource_server_hourly, or some of them, or some days. Figures of missing tables are unknown.

    \b
    Example:
      slurm-affinode trace asi2026 cluster-trace-gpu-v2026/data/ --out out/asi
    """
    from slurm_affinode.traces import asi2026 as reader  # noqa: PLC0415 - --help stays quick
    from slurm_affinode.traces import asi_page, claims  # noqa: PLC0415

    tables = reader.find(path)
    result = reader.analyse(tables)
    figures = result.as_dict()
    judged = claims.judge(claims.load("asi2026"), claims.flat(figures))
    summary = {
        "trace": "asi2026", **figures, "published": [claim.as_dict() for claim in judged],
        "notes": list(asi_page.notes(tables.missing)),
    }  # fmt: skip
    _present(summary, judged, lambda: asi_page.html(result, judged, tables.missing), out=out, as_json=as_json)


def _instance_log(trace_name: str, log: InstanceLog, *, out: Path | None, as_json: bool) -> None:
    from slurm_affinode.traces import claims, instance_page, instances  # noqa: PLC0415 - --help stays quick

    result = instances.analyse(log)
    figures = result.summary.as_dict()
    judged = claims.judge(claims.load(trace_name), claims.flat(figures))
    summary = {"trace": trace_name, **figures, "published": [claim.as_dict() for claim in judged], "notes": []}
    page = instance_page.TRACES[trace_name]
    _present(summary, judged, lambda: instance_page.html(page, result, judged), out=out, as_json=as_json)


def _job_log(
    trace_name: str, log: JobLog, *, claims_name: str | None, page_name: str | None = None, out: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    from slurm_affinode.traces import claims, job_figures, job_page  # noqa: PLC0415 - --help stays quick
    from slurm_affinode.traces.job_log import check_complete  # noqa: PLC0415

    check_complete(log, log.left_out, partial=True)
    result = job_figures.analyse(log)
    figures = result.as_dict()
    judged = claims.judge(claims.load(claims_name), claims.flat(figures), log.cluster) if claims_name else ()
    summary: dict[str, Any] = {
        "trace": trace_name,
        **figures,
        "published": [claim.as_dict() for claim in judged],
        "notes": list(job_page.notes(result)),
    }
    page = job_page.TRACES[page_name or trace_name]
    _present(summary, judged, lambda: job_page.html(page, result, judged), out=out, as_json=as_json)


_ENGINE = EngineModel()


@trace.command(short_help="Analyze the Azure LLM inference traces (2023, 2024, LMM 2025)")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@out_option
@json_option
@engine_options(default_texts(_ENGINE))
@click.option(
    "--engines",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Number of engines in the model [default: as many as the busiest minute needs]",
)
def azure(
    *,
    paths: tuple[Path, ...], out: Path | None, as_json: bool, engines: int | None, **engine_values: float | None,
) -> None:  # fmt: skip
    """Analyze the requests of the Azure LLM inference traces (2023, 2024, LMM 2025).

    PATH is a published CSV file, plain or compressed, or a directory with such files; they are analyzed one by one.
    Arrivals, tokens and work are
    exact. What engines would experience is an estimate by a queueing model over the busiest hour, with the parameters
    given; the defaults are assumptions about no particular GPU.

    \b
    Examples:
      slurm-affinode trace azure AzureLLMInferenceTrace_code.csv --out out/azure
      slurm-affinode trace azure AzureLLMInferenceTrace_conv_1week.csv --kv-tokens 120000 --json
    """
    from slurm_affinode.traces import azure_llm, requests, requests_page  # noqa: PLC0415 - --help stays quick

    engine = engine_of(_ENGINE, engine_values)
    results = []
    problems: list[str] = []
    files = azure_llm.files(paths)
    with progress("files", total=len(files), quiet=as_json) as advance:
        for path in files:
            requests_read = azure_llm.read(path)
            problems += requests_read.problems
            results.append(requests.analyse(requests_read.name, requests_read.requests, engine, engines))
            advance(1)
    for problem in problems:
        warn(f"slurm-affinode: {problem}")
    summary: dict[str, Any] = {
        "trace": "azure", "files": [result.summary.as_dict() for result in results], "notes": problems,
    }  # fmt: skip
    if out is not None:
        write_outputs(out, requests_page.html(results, problems), summary)
    if as_json:
        print_json(summary)
        return
    for result in results:
        print_table(("figure", "value"), _request_figures(result.summary.as_dict()), title=result.summary.name,
                    right=("value",))  # fmt: skip
        echo()
    if out is not None:
        echo(f"report   {out / 'report.html'}", f"summary  {out / 'summary.json'}")


def _request_figures(row: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    figures: list[tuple[str, str]] = []
    for key, value in row.items():
        if isinstance(value, dict):
            figures += _request_figures(value, f"{prefix}{key}.")
        elif key != "name":
            figures.append((f"{prefix}{key}", value if isinstance(value, str) else _plain(value)))
    return figures


config_option = click.option(
    "--config", "config_path", type=click.Path(path_type=Path), metavar="FILE",
    help=f"Read thresholds, prices and time zone from FILE [default: {config.DEFAULT_PATH}]",
)  # fmt: skip


@trace.command(short_help="Analyze per-job averages of ClusterCockpit")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@out_option
@json_option
@config_option
def clustercockpit(path: Path, out: Path | None, config_path: Path | None, as_json: bool) -> None:
    """Analyze the job database of ClusterCockpit (cc-backend, SQLite).

    FILE is the database, or its directory. A cluster.json beside it provides the GPU models. The database is opened
    read-only. It has one average per job: idle time is known only where the average is exactly 0.

    \b
    Example:
      slurm-affinode trace clustercockpit /var/lib/cc-backend/job.db --out out/cc
    """
    archive = cockpit.read(path)
    jobs = conform(pl.DataFrame(archive.jobs, schema_overrides=_overrides(), infer_schema_length=None), JOBS)
    counts = {
        "trace": "clustercockpit",
        "jobs": jobs.height,
        "gpu_jobs": int((jobs["gpus"] > 0).sum()),
        "zero_utilization_gpu_jobs": archive.zero_utilization_jobs,
    }
    settings = config.load(config_path)
    result = _analyse(jobs, archive.averages, settings, notes=archive.notes, problems=archive.problems)
    _show(
        result,
        counts,
        title="ClusterCockpit: averages per job (idle: the whole job averaged 0)",
        out=out,
        as_json=as_json,
    )


@trace.command(short_help="Analyze summaries of jobstats in AdminComment")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, allow_dash=True))
@out_option
@json_option
@click.option("--cluster", metavar="NAME", help="Assign records without a cluster to NAME")
@click.option(
    "--timezone", metavar="ZONE", help="Set the IANA zone of times without an offset [default: configuration, local]"
)
@config_option
def jobstats(
    *,
    file: Path,
    out: Path | None,
    cluster: str | None,
    timezone: str | None,
    config_path: Path | None,
    as_json: bool,
) -> None:
    """Analyze the summaries that jobstats stores in AdminComment.

    FILE is the output of sacct -P (or --json) with the fields AdminComment, Start, End and NodeList; "-" is
    standard input. Utilization is the average of a run, memory its maximum.

    \b
    Example:
      sacct -aXP -S now-7days -o Cluster,JobIDRaw,User,Account,Partition,State,Submit,Start,End,\\
          Elapsed,NNodes,NodeList,AllocTRES,AdminComment,JobName | slurm-affinode trace jobstats - --out out/js
    """
    settings = config.load(config_path)
    reading = SacctReading(
        cluster=cluster or settings.cluster.name_or_default,
        zone=times.zone_name(timezone or settings.cluster.timezone),
    )
    content = sys.stdin.buffer.read() if str(file) == "-" else file
    accounting = sacct.read(content, where=str(file), reading=reading)
    stored = summaries.find(accounting.jobs)
    if not stored.summaries and not stored.without:
        raise InputError(
            f"no jobstats summary (JS1:...) in the AdminComment of {accounting.jobs.height} runs",
            where=str(file),
            hint=stored.problems[0] if stored.problems else "add AdminComment, Start and End to the fields of sacct",
        )
    counts = {
        "trace": "jobstats",
        "jobs": accounting.jobs.height,
        "summaries": stored.summaries,
        "without_summary": stored.without,
    }
    problems = (*map(str, accounting.problems), *stored.problems)
    result = _analyse(accounting.jobs, stored.averages, settings, notes=(summaries.NOTE,), problems=problems)
    _show(result, counts, title="jobstats: averages per run (idle: the whole run averaged 0)", out=out, as_json=as_json)


def _overrides() -> dict[str, pl.DataType]:
    return {name: dtype for name, dtype in JOBS.items() if name not in ("submit", "start", "end")}


def _analyse(
    jobs: pl.DataFrame,
    per_run: pl.DataFrame,
    settings: config.Config,
    *,
    notes: tuple[str, ...],
    problems: tuple[str, ...],
) -> WasteResult:
    return averages.analyse_averages(
        jobs,
        per_run,
        prices=prices.load(settings.price.table, currency=settings.price.currency),
        thresholds=report.thresholds(settings),
        notes=notes,
        problems=problems,
        zone=times.site_zone(settings.cluster.timezone),
    )


def _show(result: WasteResult, counts: Mapping[str, Any], *, title: str, out: Path | None, as_json: bool) -> None:
    summary = {**build_summary(result, title=title), "source": dict(counts)}
    if out is not None:
        write_outputs(out, render_report(result, title=title, top=DEFAULT_TOP), summary)
    if as_json:
        print_json(summary)
        return
    print_table(("", ""), [(key.replace("_", " "), value) for key, value in counts.items()], right=("",))
    echo()
    print_table(("", "GPU-hours", "of allocated"), headline_rows(result), right=("GPU-hours", "of allocated"))
    warn(f"note: {NOTE}")
    for issue in result.quality.issues:
        if issue.code == "bad-records":
            for example in issue.examples:
                warn(f"note: {example}")
    if out is not None:
        echo("", f"report   {out / 'report.html'}", f"summary  {out / 'summary.json'}")
