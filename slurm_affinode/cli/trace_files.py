"""Writing what a trace command gives: both files or none, with a clear line where that fails."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_affinode import files
from slurm_affinode.errors import AffinodeError
from slurm_affinode.report.build import check_directory


def write_outputs(out: Path, html: str, summary: Mapping[str, Any]) -> None:
    """Write ``report.html`` and ``summary.json`` into ``out``. Raises ``AffinodeError`` if that fails."""
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    check_directory(out)
    try:
        files.write_text(out / "report.html", html)
        files.write_text(out / "summary.json", text)
    except OSError as error:
        raise AffinodeError(
            f"{out}: cannot write the report: {error.strerror or error}", hint="name another directory with --out"
        ) from error
