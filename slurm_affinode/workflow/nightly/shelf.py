"""The directory of past reports: what is there, its index page, what goes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any

from slurm_affinode import __version__, files
from slurm_affinode.errors import AffinodeError
from slurm_affinode.report.index import IndexEntry, render_index
from slurm_affinode.store.records import ReportRecord
from slurm_affinode.workflow.nightly.periods import KINDS

REPORT = "report.html"
INDEX = "index.html"
INDEX_DATA = "index.json"

_LABEL = re.compile(r"\d{4}-(?:\d{2}(?:-\d{2})?|W\d{2})")


def holds(out: Path, path: str) -> bool:
    """Whether the report at ``path`` (below ``out``) is there."""
    return (out / path / REPORT).is_file()


def headline(summary: Mapping[str, Any]) -> dict[str, float | int | str | None]:
    """The figures of ``summary.json`` that the index page shows."""
    total = summary["total"]
    if summary["price_source"] != "site":
        total = {key: value for key, value in total.items() if not key.endswith("cost")}
    return {**total, "currency": summary["currency"]}


def write_index(
    out: Path, records: Sequence[ReportRecord], now: datetime, *, zone: tzinfo, force: bool = False
) -> bool:
    """Write ``index.html`` and ``index.json`` of the reports that are there, unless they are (``force``: even then);
    whether they were written.

    Raises ``AffinodeError`` where they cannot be written.
    """
    entries = [
        IndexEntry(
            kind=record.period,
            label=record.label,
            since=record.since,
            until=record.until,
            href=f"{record.path}/{REPORT}",
            total={key: value for key, value in record.summary.items() if not isinstance(value, str)},
            currency=str(record.summary.get("currency") or ""),
        )
        for record in records
        if holds(out, record.path)
    ]
    listed = {
        "generator": f"slurm-affinode {__version__}",
        "timezone": str(zone),
        "reports": [_plain(entry) for entry in entries],
    }
    data = json.dumps(listed, indent=1, ensure_ascii=False) + "\n"
    if not force and (out / INDEX).is_file() and _read(out / INDEX_DATA) == data:
        return False
    html = render_index(entries, generated=now, zone=zone)
    try:
        files.write_text(out / INDEX, html)
        files.write_text(out / INDEX_DATA, data)  # last: it says that the page is current
    except OSError as error:
        raise AffinodeError(f"{out}: cannot be written: {error.strerror}") from error
    return True


def _plain(entry: IndexEntry) -> dict[str, object]:
    return {
        "kind": entry.kind,
        "label": entry.label,
        "since": _time(entry.since),
        "until": _time(entry.until),
        "href": entry.href,
        "currency": entry.currency,
        "total": entry.total,
    }


def _time(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def remove(out: Path, record: ReportRecord) -> None:
    """Remove the directory of a report; one that is gone is fine.

    Its name is made of kind and label again, and both are checked: what a database says names no other directory.
    Raises ``AffinodeError`` for such a name, and where the directory cannot be removed.
    """
    if record.period not in KINDS or not _LABEL.fullmatch(record.label):
        raise AffinodeError(f"{record.period}/{record.label}: not a report of this program; nothing was removed")
    try:
        shutil.rmtree(out / record.period / record.label)
    except FileNotFoundError:
        return
    except OSError as error:
        raise AffinodeError(f"{out / record.path}: cannot be removed: {error.strerror or error}") from error
