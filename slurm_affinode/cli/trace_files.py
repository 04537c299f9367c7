"""Writing what a trace command gives: both files or none, with a clear line where that fails."""

from __future__ import annotations

from pathlib import Path

from slurm_affinode.report.build import write_files
from slurm_affinode.report.summary import Summary, to_json


def write_outputs(out: Path, html: str, summary: Summary) -> None:
    """Write ``report.html`` and ``summary.json`` into ``out``. Raises ``AffinodeError`` if that fails."""
    write_files(out, {"report.html": html.encode(), "summary.json": to_json(summary).encode()})
