"""Pages of users and accounts, and of their jobs, as files for a plain web server.

Each user and account has a directory that holds nothing of others, with the rules of access for Apache beside it. All
directories and files belong to the service; the group of the root, which they inherit, is that of the web server.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import polars as pl

from slurm_affinode.analysis import actions
from slurm_affinode.analysis.portions import Rank, portions, ranks, without_runs
from slurm_affinode.analysis.result import PeriodHours, Trend, WasteResult
from slurm_affinode.base import files
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import UnreachableError, unwritable
from slurm_affinode.base.text import counted
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.db.records import ReportRecord
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.model.job_summary import JobSummary
from slurm_affinode.pipeline.report_archive import TREND_PERIODS, Period
from slurm_affinode.report import job_page, output, usage_page
from slurm_affinode.report.links import NO_LINKS, JobKey, Links
from slurm_affinode.report.usage_page import UsagePage

Summarize = Callable[[Config, Repository, SampleStore, pl.DataFrame, datetime], Sequence[JobSummary]]
"""Summarizes attempts (``JOBS``) in their order."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,99}")
"""Names that get pages: they are names of directories, and words in rules of access."""
JOBS_PER_USER = 5
"""Runs of a user with a page in each period: those with most idle GPU-hours."""
_PREFERRED = ("week", "month", "day")
"""Periods in the order in which their page becomes ``index.html``."""
_DIRECTORY_MODE, _FILE_MODE = 0o750, 0o640
_INDEX = "index.html"
_RULES = ".htaccess"
_CLOSED = "# Made by slurm-affinode nightly: only the directories of users and accounts are open.\nRequire all denied\n"
_PUBLISHED = "pages.published"
"""Key: directory, and the report from which the pages of each kind of period were made."""
_KEY = ("cluster", "job_id", "submit")
_HOURS = ("allocated", "measured", "unknown", "idle", "low", "busy")


@dataclass(slots=True)
class UsagePages:
    """The pages of a site at ``now``; ``out``: the root of the reports."""

    config: Config
    store: Repository
    samples: SampleStore
    out: Path
    now: datetime
    summarize: Summarize
    say: Callable[[str], None] = lambda _: None
    shown: Callable[[str, str], str] = lambda _, name: name
    """Kind (``user``, ``account``) and name -> the name in the stored tables of reports."""
    _written_pages: set[Path] = field(default_factory=set)
    """Pages of jobs that this run has made."""
    _results: dict[str, tuple[str, WasteResult]] = field(default_factory=dict)
    """Kind of period -> label and result of the latest report that this run has rendered."""
    _opened: set[Path] = field(default_factory=set)
    """Directories that this run has prepared."""

    @property
    def root(self) -> Path:
        """The directory of the pages. The caller has checked that one is configured."""
        assert self.config.nightly.pages.directory is not None  # noqa: S101
        return self.config.nightly.pages.directory

    def publish(self, period: Period, result: WasteResult, *, newest: bool) -> Links:
        """Make the pages of jobs of a report; return its links to pages, with those that ``finish`` makes.

        ``newest``: it is the latest period of its kind. Raises ``AffinodeError`` if the directory is not the service's
        own or cannot be written.
        """
        try:
            _prepare(self.root)
            self._jobs(result)
        except OSError as error:
            raise unwritable(error.filename or self.root, error) from error
        self._results[period.kind] = period.label, result
        return self._links(period, result, newest=newest)

    def finish(self, newest: Sequence[ReportRecord], analyze: Callable[[ReportRecord], WasteResult]) -> int:
        """Make the pages of users and accounts of the ``newest`` report of each kind, and delete expired ones.

        Only what has changed is made. ``analyze`` is called for reports that this run has not rendered. Return the
        number of users with pages. Raises ``AffinodeError`` as ``publish`` does.
        """
        publication = json.loads(self.store.get(_PUBLISHED) or "{}")
        current = publication["reports"] if publication.get("directory") == str(self.root) else {}
        kinds = tuple(kind for kind in usage_page.KINDS if kind in {record.period for record in newest})
        try:
            _prepare(self.root)
            for record in newest:
                source = [record.label, record.fingerprint]
                if current.get(record.period) != source:
                    label, result = self._results.get(record.period, ("", None))
                    self._usage(record, kinds, analyze(record) if result is None or label != record.label else result)
                    current[record.period] = source
            self._complete(newest, kinds)
            self.store.set(_PUBLISHED, json.dumps({"directory": str(self.root), "reports": current}))
            users = self._expire(newest)
        except OSError as error:
            raise unwritable(error.filename or self.root, error) from error
        self.say(f"  pages of {counted(users, 'user')} in {self.root}")
        return users

    def _complete(self, newest: Sequence[ReportRecord], kinds: tuple[str, ...]) -> None:
        """Make the missing pages of new directories: their users had no run in the latest periods of these kinds."""
        if not self._results:
            return
        _, result = next(iter(self._results.values()))  # of any period: nothing of it but settings is used
        for by, record in ((by, record) for by in ("user", "account") for record in newest):
            for directory in _subdirectories(self.root / by):
                if not (directory / f"{record.period}.html").exists():
                    query = replace(result.query, since=record.since, until=record.until)
                    part = without_runs(replace(result, query=query), by, directory.name)
                    self._page(by, directory.name, record, part, kinds=kinds)

    def _expire(self, newest: Sequence[ReportRecord]) -> int:
        """Delete expired pages of jobs, and directories without any of those who are in no ``newest`` report."""
        before = (self.now - timedelta(seconds=parse_span_s(self.config.nightly.pages.keep))).timestamp()
        users = 0
        for by in ("user", "account"):
            active = {name for record in newest for name in self._table(record, by)}
            for directory in _subdirectories(self.root / by):
                jobs = list(directory.glob("job-*.html"))
                unwanted = by == "account" and not self.config.nightly.pages.account_jobs
                expired = [path for path in jobs if unwanted or path.stat().st_mtime < before]
                is_listed = by == "user" or directory.name in self.config.nightly.pages.accounts
                inactive = self.shown(by, directory.name) not in active and len(expired) == len(jobs)
                if inactive or not is_listed:
                    shutil.rmtree(directory)
                    continue
                for path in expired:
                    path.unlink()
                users += by == "user"
        return users

    def _links(self, period: Period, result: WasteResult, *, newest: bool) -> Links:
        """Return the links of a report; none if the site has set no address."""
        url = self.config.nightly.pages.url
        if url is None:
            return NO_LINKS
        relative = not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:|/", url)
        base = ("../" * (1 + period.path.count("/")) if relative else "") + url.rstrip("/")
        users, accounts = (
            {name: f"{base}/{by}/{quote(name)}/{_INDEX}" for name in self._named(by, result if newest else None)}
            for by in ("user", "account")
        )
        names = set(result.jobs["user"].unique()) & users.keys()
        jobs = {
            key: f"{base}/user/{quote(user)}/{quote(page)}"
            for user in names
            for key, page in self._pages_of("user", user, result).items()
        }
        return Links(jobs, users, accounts)

    def _named(self, by: str, result: WasteResult | None) -> set[str]:
        """Return the users or accounts that have pages, or get them since they are in a result."""
        names = {path.name for path in _subdirectories(self.root / by)}
        if result is not None:
            names |= {name for name in result.jobs[by].unique() if name is not None and NAME.fullmatch(name)}
        return names if by == "user" else names & self.config.nightly.pages.accounts.keys()

    def _pages_of(self, by: str, name: str, result: WasteResult) -> dict[JobKey, str]:
        """Return the pages of the runs of a user or account in a result: run -> name of the file."""
        if by == "account" and not self.config.nightly.pages.account_jobs:
            return {}
        present = {path.name for path in (self.root / by / name).glob("job-*.html")}
        if not present:
            return {}
        keys: list[JobKey] = result.jobs.filter(pl.col(by) == name).select(_KEY).rows()
        return {key: name for key in keys if (name := job_file(*key)) in present}

    def _jobs(self, result: WasteResult) -> None:
        """Make the pages of the runs with most idle hours, of the report and of each user, and of its actions."""
        idle = result.jobs.filter(pl.col("gpu_hours_idle") > 0)
        place = pl.int_range(pl.len())
        first = idle.filter((place < output.DEFAULT_TOP) | (place.over("user") < JOBS_PER_USER))
        named = pl.DataFrame(
            [(action.cluster, action.job_id) for action in actions.actions(result)],
            schema={name: result.jobs.schema[name] for name in ("cluster", "job_id")}, orient="row",
        )  # fmt: skip
        of_actions = result.jobs.join(named, on=["cluster", "job_id"], how="semi", maintain_order="left")
        chosen = pl.concat([first, of_actions]).unique(_KEY, keep="first", maintain_order=True)
        due = [
            row for row in chosen.select(*_KEY, "user", "account", "end").iter_rows()
            if NAME.fullmatch(row[3] or "") and NAME.fullmatch(row[0] or "") and not self._is_made(*row)
        ]  # fmt: skip
        if not due:
            return
        requested = pl.DataFrame(
            [row[:3] for row in due], schema={name: result.jobs.schema[name] for name in _KEY}, orient="row"
        )
        stored = self.store.jobs(result.query.since, result.query.until)
        attempts = stored.join(requested, on=_KEY, how="semi", maintain_order="left").with_columns(
            pl.col("end").dt.date().alias("day")
        )
        # By day of the end, so that the attempts of a chunk, and their samples, are of about the same time.
        for chunk in attempts.sort("end", nulls_last=True).partition_by("day", maintain_order=True, include_key=False):
            for summary in self.summarize(self.config, self.store, self.samples, chunk, self.now):
                self._write_job(summary, result)

    def _is_made(  # noqa: PLR0917 - a row
        self, cluster: str, job_id: int, submit: datetime, user: str, account: str | None, end: datetime | None
    ) -> bool:
        """Return whether the page of a run is in each place, and accounting was complete when it was made."""
        name = job_file(cluster, job_id, submit)
        paths = [self.root / by / owner / name for by, owner in self._places(user, account)]
        if self._written_pages.issuperset(paths):
            return True
        late = parse_span_s(self.config.nightly.sacct_overlap)
        try:
            return end is not None and all(path.stat().st_mtime > end.timestamp() + late for path in paths)
        except FileNotFoundError:
            return False

    def _places(self, user: str, account: str | None) -> Iterator[tuple[str, str]]:
        """Yield the directories of a run's page, of user and account: readers of the latter cannot read the former."""
        yield "user", user
        pages = self.config.nightly.pages
        if pages.account_jobs and account is not None and account in pages.accounts and NAME.fullmatch(account):
            yield "account", account

    def _write_job(self, summary: JobSummary, result: WasteResult) -> None:
        job, user = summary.job, summary.user
        if user is None or job.submit is None:
            return
        html = job_page.render(summary, result.query.zone, result.query.thresholds)
        for by, name in self._places(user, summary.account):
            path = self._directory(by, name) / job_file(summary.cluster, job.job_id, job.submit)
            self._write(path, html)
            self._written_pages.add(path)

    def _usage(self, period: ReportRecord, kinds: tuple[str, ...], result: WasteResult) -> None:
        """Make the pages of users and accounts of a period, also of those who have others and no run in it."""
        accounts = self.config.nightly.pages.accounts
        for by in ("user", "account"):
            earlier = self._earlier(period, by)
            places = ranks(result.groups[by]) if by in result.groups else {}
            written = set()
            for name, part in portions(result, by):
                if NAME.fullmatch(name) and (by == "user" or name in accounts):
                    written.add(name)
                    trend = self._trend(by, name, period, earlier)
                    self._page(by, name, period, replace(part, trend=trend), kinds=kinds, rank=places.get(name))
            for directory in _subdirectories(self.root / by):
                if directory.name not in written:
                    part = without_runs(result, by, directory.name)
                    self._page(by, directory.name, period, part, kinds=kinds)

    def _page(
        self,
        by: str,
        name: str,
        period: ReportRecord,
        part: WasteResult,
        *,
        kinds: tuple[str, ...],
        rank: Rank | None = None,
    ) -> None:
        directory = self._directory(by, name)
        links = Links({key: quote(page) for key, page in self._pages_of(by, name, part).items()})
        csv_name = f"{period.period}-jobs.csv" if part.jobs.height > usage_page.JOB_ROWS else None
        about = UsagePage(by, name, period.period, period.label, kinds)
        html = usage_page.render(part, about, rank=rank, csv_name=csv_name, links=links)
        if csv_name is not None:
            self._write(directory / csv_name, output.to_csv(part.jobs).decode())
        else:
            (directory / f"{period.period}-jobs.csv").unlink(missing_ok=True)
        self._write(directory / f"{period.period}.html", html)
        if period.period == next(kind for kind in _PREFERRED if kind in kinds):
            self._write(directory / _INDEX, html)

    def _directory(self, by: str, name: str) -> Path:
        """Create the directory of a user or account with its rules of access if it is absent; return it."""
        directory = self.root / by / name
        if directory not in self._opened:
            for path in (directory.parent, directory):
                _make(path)
            pages = self.config.nightly.pages
            readers = {name} if by == "user" else set(pages.accounts.get(name, ()))
            rules = _rules(readers | set(pages.readers))
            if _text(directory / _RULES) != rules:
                self._write(directory / _RULES, rules)
            self._opened.add(directory)
        return directory

    def _write(self, path: Path, text: str) -> None:
        files.write_text(path, text, mode=_FILE_MODE, durable=False)

    def _earlier(self, period: ReportRecord, by: str) -> list[tuple[ReportRecord, Mapping[str, PeriodHours]]]:
        records = [r for r in self.store.reports() if r.period == period.period and r.until <= period.since]
        records.sort(key=lambda record: record.since)
        return [(record, self._table(record, by)) for record in records[-TREND_PERIODS:]]

    def _trend(
        self,
        by: str,
        name: str,
        period: ReportRecord,
        earlier: Sequence[tuple[ReportRecord, Mapping[str, PeriodHours]]],
    ) -> Trend | None:
        known_rows = [table[shown] for _, table in earlier if (shown := self.shown(by, name)) in table]
        return Trend(period.period, tuple(known_rows)) if known_rows else None

    def _table(self, record: ReportRecord, by: str) -> Mapping[str, PeriodHours]:
        """Return the figures of all users or accounts in a stored report."""
        path = self.out / record.path / f"{by}s.csv"
        names = [f"gpu_hours_{state}" for state in _HOURS]
        types = {"name": pl.String(), **dict.fromkeys(names, pl.Float64())}
        try:
            frame = pl.read_csv(path, columns=list(types), schema_overrides=types)
        except (OSError, pl.exceptions.PolarsError):
            return {}  # deleted, or of an earlier version
        return {
            row["name"]: PeriodHours(record.label, record.since, record.until, {key: row[key] for key in names})
            for row in frame.filter(pl.col("name").is_not_null()).iter_rows(named=True)
        }


def job_file(cluster: str, job_id: int, submit: datetime) -> str:
    """Return the name of the page of a run."""
    return f"job-{cluster}-{job_id}-{int(submit.timestamp())}.html"


def _rules(readers: Iterable[str]) -> str:
    names = sorted(name for name in readers if NAME.fullmatch(name))
    rule = f"Require user {' '.join(names)}" if names else "Require all denied"
    return f"# Made by slurm-affinode nightly. Configure authentication in the server.\n{rule}\n"


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def _prepare(root: Path) -> None:
    """Create the root if it is absent. Raises ``UnreachableError`` unless it is the service's own."""
    _make(root)
    facts = root.lstat()
    if stat.S_ISLNK(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise UnreachableError(
            f"{root}: is not used for pages: it is a symbolic link, belongs to another user, or others may write to it",
            hint="give the directory to the user who runs nightly, with the group of the web server and mode 2750",
        )
    if _text(root / _RULES) != _CLOSED:
        files.write_text(root / _RULES, _CLOSED, mode=_FILE_MODE)


def _make(directory: Path) -> None:
    """Create a directory for the owner and the group, whatever the umask; the group is inherited."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=_DIRECTORY_MODE)
        mode = stat.S_IMODE(directory.stat().st_mode)
        if mode & 0o777 != _DIRECTORY_MODE:
            directory.chmod((mode & ~0o777) | _DIRECTORY_MODE)


def _subdirectories(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        for path in sorted(directory.iterdir()):
            if path.is_dir() and not path.is_symlink() and NAME.fullmatch(path.name):
                yield path
