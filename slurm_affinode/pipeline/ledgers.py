"""Ingest of the ledgers in which agents record suspensions."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import InputError
from slurm_affinode.db.records import Counts, IngestProblem, IngestRecord
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.ledger import LedgerEntry, decode


@dataclass(frozen=True, slots=True)
class LedgerIntake:
    """The outcome of ingesting one ledger."""

    source: str
    entries: int
    counts: Counts | None
    """``None``: nothing was stored (a dry run)."""
    problems: tuple[IngestProblem, ...] = ()


def ledgers(path: Path) -> list[Path]:
    """Return the ledgers in a directory, or the single file. Raises ``InputError``."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return [path]
        # glob() returns nothing, without an error, for an unreadable directory.
        files = (path / name for name in os.listdir(path) if name.endswith(".jsonl"))  # noqa: PTH208
        return sorted(file for file in files if file.is_file())
    except FileNotFoundError as error:
        raise InputError(
            "no such file or directory", where=str(path), hint="give the directory of the ledgers"
        ) from error
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from error


def read(path: Path) -> tuple[list[LedgerEntry], list[IngestProblem], str]:
    """Return the entries of a ledger, its bad lines, and its fingerprint. Raises ``InputError``.

    An incomplete last line is skipped: it is being written.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from error
    whole = data[: data.rfind(b"\n") + 1]
    entries, problems = [], []
    for number, line in enumerate(whole.decode("utf-8", "replace").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entries.append(decode(line))
        except ValueError as error:
            problems.append(IngestProblem(str(error), number))
    return entries, problems, hashlib.sha256(whole).hexdigest()


def ingest_ledgers(store: Repository | None, path: Path) -> list[LedgerIntake]:
    """Ingest the ledgers at ``path``; known entries are no-ops. If ``store`` is ``None`` they are only read."""
    return [_take_in(store, ledger) for ledger in ledgers(path)]


def _take_in(store: Repository | None, path: Path) -> LedgerIntake:
    started = datetime.now(UTC)
    entries, problems, fingerprint = read(path)
    if store is None:
        return LedgerIntake(str(path), len(entries), None, tuple(problems))
    if fingerprint in store.fingerprints("suspensions"):
        return LedgerIntake(str(path), len(entries), Counts(unchanged=len(entries)), tuple(problems))
    counts = store.upsert_suspensions(entries)
    store.record_ingest(
        IngestRecord(
            kind="suspensions",
            source=str(path),
            started=started,
            finished=datetime.now(UTC),
            records=len(entries),
            new=counts.new,
            updated=counts.updated,
            unchanged=counts.unchanged,
            bad=len(problems),
            problems=tuple(problems),
            fingerprint=fingerprint,
        )
    )
    return LedgerIntake(str(path), len(entries), counts, tuple(problems))


def configured(
    config: Config, store: Repository, *, unread: Callable[[str], None] = lambda line: None
) -> list[LedgerIntake]:
    """Ingest the ledgers of the configured directory; none if it is not set or does not exist.

    Ledgers that this user may not read are reported to ``unread`` and skipped: agents write as root, by default into a
    directory of root's, and reports are possible without them. Raises ``InputError`` for other errors.
    """
    intakes: list[LedgerIntake] = []
    paths: list[Path] = []
    if config.ledger_dir is not None:
        with _allowed(unread):
            paths = ledgers(config.ledger_dir)
    for path in paths:
        with _allowed(unread):
            intakes.append(_take_in(store, path))
    return intakes


@contextlib.contextmanager
def _allowed(unread: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        if isinstance(error.__cause__, PermissionError):
            unread(f"{error}: its entries are missing; suspend.ledger may name a directory that others can read")
        elif not isinstance(error.__cause__, FileNotFoundError):
            raise
