"""``slurm-affinode trace``: public traces and per-job averages of other monitoring systems."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from slurm_affinode.cli.main import LazyGroup
from slurm_affinode.cli.options import json_option, print_json, print_table, progress, warn

_TRACES = {
    "clustercockpit": (
        "slurm_affinode.cli.trace_runs:clustercockpit",
        "Per-job averages of ClusterCockpit's job database.",
    ),
    "jobstats": (
        "slurm_affinode.cli.trace_runs:jobstats",
        "Summaries that jobstats keeps in AdminComment, from sacct output.",
    ),
}
_EPILOG = """\b
Examples:
  slurm-affinode trace gentd26 cluster-trace-v2026-GenAI/ --out out/gentd26
  slurm-affinode trace clustercockpit /var/lib/cc-backend/job.db --out out/cc
  sacct -aP -o Cluster,JobID,JobIDRaw,User,Account,Partition,State,Submit,Start,End,\\
      Elapsed,NNodes,NodeList,AllocTRES,AdminComment,JobName | slurm-affinode trace jobstats -
"""


class _TraceGroup(LazyGroup):
    """Commands of the table after those of this module; all of them listed."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self.commands[name].get_short_help_str(100)) for name in self.commands]
        rows += [(name, text) for name, (_, text) in _TRACES.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=_TraceGroup, lazy=_TRACES, epilog=_EPILOG)
def trace() -> None:
    """Analyse a public trace, or the averages that another monitoring system kept."""


out_option = click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Write report.html and summary.json here. Without it, only the figures are printed.",
)  # fmt: skip


@trace.command("gentd26", short_help="Alibaba GenAI serving trace 2026: GPU memory held while idle.")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@out_option
@json_option
def gentd26(paths: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Analyse the Alibaba GenAI serving trace 2026 (GenTD26).

    PATH is the directory with the published archives, with the CSV files taken out of them, or with some of each;
    single files may be named as well. Tables that are missing make their figures unknown. Every figure is computed
    from the files; what was published about the trace is set beside it, with the verdict.

    \b
    Example:
      slurm-affinode trace gentd26 cluster-trace-v2026-GenAI/ --out out/gentd26
    """
    from slurm_affinode.analysis import claims, serving  # noqa: PLC0415 - --help stays quick
    from slurm_affinode.cli.trace_files import write_outputs  # noqa: PLC0415
    from slurm_affinode.history.traces import gentd26 as reader  # noqa: PLC0415
    from slurm_affinode.report import serving_page  # noqa: PLC0415

    with progress("files", total=None) as advance:
        found = reader.read(paths, on_file=lambda _: advance(1))
        result = serving.analyse(found)
    judged = claims.judge(claims.load("gentd26"), result.summary.as_dict())
    summary: dict[str, Any] = {
        "trace": "gentd26",
        **result.summary.as_dict(),
        "published": [claim.as_dict() for claim in judged],
        "notes": list(result.notes),
    }
    if out is not None:
        write_outputs(out, serving_page.html(result, judged), summary)
    if as_json:
        print_json(summary)
        return
    print_table(("figure", "value"), _figures(summary), right=("value",))
    click.echo()
    print_table(("published", "the data", "verdict"), [_claim(claim) for claim in judged])
    for note in result.notes:
        warn(f"note: {note}")
    if out is not None:
        click.echo(f"\nreport   {out / 'report.html'}\nsummary  {out / 'summary.json'}")


def _figures(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for key, value in summary.items():
        if isinstance(value, dict):
            rows += [(f"{key}.{name}", _plain(part)) for name, part in value.items()]
        elif not isinstance(value, list | str):
            rows.append((key, _plain(value)))
    return rows


def _plain(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}".rstrip("0").rstrip(".")


def _claim(claim: Any) -> tuple[str, str, str]:
    if claim.computed is None:
        return claim.text, "unknown", claim.verdict
    digits = claim.decimals if claim.computed == round(claim.computed) else claim.decimals + 1
    return claim.text, f"{claim.computed:,.{digits}f} {claim.unit}", claim.verdict
