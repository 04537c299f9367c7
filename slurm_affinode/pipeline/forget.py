"""Removal of a user's data: pseudonyms in the database, and the published files that name the user."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import unwritable
from slurm_affinode.base.text import counted
from slurm_affinode.base.users import name_of_user
from slurm_affinode.db.records import ReportRecord
from slurm_affinode.db.repository import Repository
from slurm_affinode.engines.store import engine_store
from slurm_affinode.pipeline import report_archive
from slurm_affinode.pipeline.usage_pages import NAME

_TEXT = {".csv", ".html", ".json", ".txt", ".jsonl"}


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Changes made, or without ``apply`` only planned."""

    pseudonym: str | None
    """``None``: nothing was changed."""
    rows: Mapping[str, int]
    """Table -> rows."""
    reports: Sequence[str]
    """Reports that name the user: ``day/2026-11-20``. They are removed."""
    files: Sequence[str]
    """Published summaries of the user's jobs, and directories of pages that name the user. They are removed."""
    remaining: Sequence[str]
    """Places with data of the user that this command does not change."""


def forget(config: Config, user: str, now: datetime, *, apply: bool) -> Forgotten:
    """Forget a user. Raises ``AffinodeError`` if the database or a file cannot be written."""
    with Repository.open(config.db_url, create=False) as store:
        uids = store.uids_of(user)
        reports = [record for record in store.reports() if _names(config.reports_dir / record.path, user)]
        files = [*_summaries(config, user, uids), *_pages(config, user)]
        if apply:
            _remove(config, store, reports, files)
        pseudonym, rows = store.forget(user, now, apply=apply)
    return Forgotten(
        pseudonym if apply else None, rows, [f"{report.period}/{report.label}" for report in reports],
        [*map(str, files)], _remaining(config, user),
    )  # fmt: skip


def _remove(config: Config, store: Repository, reports: Sequence[ReportRecord], files: Sequence[Path]) -> None:
    # The files first: if one cannot be removed, the next call finds them again.
    for record in reports:
        report_archive.remove(config.reports_dir, record)
    store.delete_reports(reports)
    for path in files:
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(path, error) from error
    if reports:
        report_archive.write_index(
            config.reports_dir, store.reports(), datetime.now(UTC), zone=UTC, force=True
        )  # fmt: skip


def _names(directory: Path, user: str) -> bool:
    """Return whether a file of a report contains the name of the user."""
    word = re.compile(rf"(?<![\w.-]){re.escape(user)}(?![\w-])".encode())
    for path in directory.rglob("*") if directory.is_dir() else ():
        if path.suffix in _TEXT and path.is_file() and word.search(path.read_bytes()):
            return True
    return False


def _summaries(config: Config, user: str, uids: Sequence[int]) -> list[Path]:
    """Return the summaries of the user's jobs, and the copies of the service. A UID may belong to another user now."""
    places = [config.job_summaries_dir]
    if config.nightly.jobs.directory is not None:
        places.append(config.nightly.jobs.directory)
    user_uids = [uid for uid in uids if name_of_user(uid) in (user, str(uid))]
    return [path for place in places for uid in user_uids if (path := place / f"{uid}.jsonl").is_file()]


def _pages(config: Config, user: str) -> list[Path]:
    """Return the directory of the user's pages, and those of accounts whose pages name the user."""
    root = config.nightly.pages.directory
    if root is None or not NAME.fullmatch(user):
        return []
    accounts = [path for path in sorted(root.glob("account/*")) if _names(path, user)]
    return [path for path in (root / "user" / user, *accounts) if path.is_dir()]


def _remaining(config: Config, user: str) -> list[str]:
    places = ["slurmdbd: accounting of the cluster, which this program only reads; newer jobs are ingested from there"]
    ledgers = config.ledger_dir
    if ledgers is not None and ledgers.is_dir():
        count = sum(f'"user":"{user}"' in path.read_text("utf-8", "replace") for path in ledgers.glob("*.jsonl"))
        if count:
            places.append(f"{ledgers}: {counted(count, 'ledger')} of agents; entries ingested again get the pseudonym")
    with closing(engine_store(config.serving_dir)) as engines:
        rows = engines.scan(datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC))
        count = rows.filter(pl.col("user") == user).select(pl.len()).collect().item()
    if count:
        keep = config.nightly.keep_samples
        places.append(f"{config.serving_dir}: {counted(count, 'engine sample')}, which are deleted after {keep}")
    return [*places, "backups, logs, and mails that were sent"]
