"""Which format a file has, told by its content."""

from __future__ import annotations

import json
import re
from pathlib import Path

from slurm_affinode.errors import InputError
from slurm_affinode.history.aliases import Aliases
from slurm_affinode.history.csvfile import after_preface, is_smi_header, is_table
from slurm_affinode.history.dmon import HEADER
from slurm_affinode.history.lines import head
from slurm_affinode.packed import is_binary

FORMATS = ("prometheus", "openmetrics", "prometheus-json", "csv", "nvidia-smi", "dmon", "parquet")
"""What can be read. ``prometheus`` is exposition text."""

_NUMBER = r"[-+]?(?:[0-9.]\S*|[iI]nf|[nN]a[nN])"
_SAMPLE = re.compile(
    rf"^(?:[a-zA-Z_:][a-zA-Z0-9_:]*(?:\s*\{{.*\}})?|\{{.*\}})\s+{_NUMBER}(?:\s+[-+]?[0-9.]\S*)?(?:\s+#.*)?\s*$"
)
_COMMENT = re.compile(r"^#\s*(?:HELP|TYPE|UNIT|EOF)\b")
_SMI_ROW = re.compile(r"GPU-[0-9a-f]{8}-|\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{3}\s*,|,\s*\d+ (?:%|MiB)\s*(?:,|$)")

_OTHER_SMI = re.compile(r"=+NVSMI LOG=|<!DOCTYPE nvidia_smi_log|\|\s*NVIDIA-SMI \d|#\s*(?:Date\s+Time\s+)?gpu\s")
"""The first lines of what nvidia-smi prints in other forms: ``-q``, ``-q -x``, its table, ``dmon`` and ``pmon``."""


def detect(path: Path, name: str, aliases: Aliases) -> str:
    """The format of ``path``, one of ``FORMATS``. Raises ``InputError`` saying in one line what the file is instead."""
    start = head(path)
    if not start.strip():
        raise InputError("is empty", where=name)
    if start.startswith(b"PAR1"):
        return "parquet"
    if is_binary(start):
        raise InputError("is a binary file of no known format", where=name, hint=_known())
    text = start.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    whole = [line for line in text.split("\n") if line.strip()]
    lines = after_preface(whole, aliases)
    # A line of exposition text may begin with a brace too: {"name", label="value"} 5
    if text.lstrip()[:1] in "{[" and not _SAMPLE.match(lines[0]) and _is_json(text):
        return "prometheus-json"
    if any(HEADER.match(line) for line in lines[:50]):
        return "dmon"
    if any(_OTHER_SMI.match(line) for line in lines[:5]):
        hint = (
            "log with nvidia-smi --query-gpu=timestamp,uuid,utilization.gpu,memory.used,power.draw --format=csv -l 30"
        )
        raise InputError("is output of nvidia-smi in a form that is not read", where=name, hint=hint)
    if _COMMENT.match(lines[0]) or _is_exposition(lines):
        return "openmetrics" if any(re.match(r"#\s*(?:EOF|UNIT)\b", line) for line in lines) else "prometheus"
    if is_smi_header(lines[0].strip()) or (_SMI_ROW.search(lines[0]) and not is_table(lines[0], aliases)):
        return "nvidia-smi"
    if is_table(lines[0], aliases):
        return "csv"
    raise InputError(f"has no known format; it begins with {whole[0].strip()[:60]!r}", where=name, hint=_known())


def _known() -> str:
    return f"formats: {', '.join(FORMATS)}; force one with --format"


def _is_json(text: str) -> bool:
    """Whether the text is JSON or the beginning of it, and no exposition text (``{`` never begins a metric name)."""
    try:
        json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return re.match(r'\s*[\[{]\s*(?:"|\{|\[)', text) is not None
    return True


def _is_exposition(lines: list[str]) -> bool:
    """Whether most of the first lines are samples or comments; the last may be cut by the size of the sample."""
    if "{" in lines[0] and _SAMPLE.match(lines[0]):
        return True
    seen = lines[: min(50, max(1, len(lines) - 1))]
    hits = sum(bool(_SAMPLE.match(line) or line.startswith("#")) for line in seen)
    metrics = any("{" in line for line in seen) or any(not line.startswith("#") for line in seen)
    return metrics and 2 * hits >= len(seen) and not any(mark in seen[0].split("{")[0] for mark in (",", ";", "\t"))
