"""Pages of 1,000 users: ``python benchmarks/bench_pages.py [--users 1000] [--jobs 20000] [--days 7] [--profile]``.

Builds a database with job runs of this many users (half of them with GPUs) and samples of 256 GPUs, one per minute, and
analyzes them as ``nightly`` does. Then measures what ``nightly`` writes below ``nightly.pages.directory``: on the first
night the pages of users and of their jobs with most idle time, and again the pages of users alone, as for a report that
has changed. The peer only writes the same files. The limit is 60 s for the first night.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from bench_report import START, build
from ratios import MISSED, report

from slurm_affinode.analysis.result import WasteQuery, WasteResult
from slurm_affinode.base.config import Config, StoreConfig, parse
from slurm_affinode.db.records import ReportRecord
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.pipeline.report import analyse_stored
from slurm_affinode.pipeline.report_archive import Period
from slurm_affinode.pipeline.usage_pages import UsagePages
from slurm_affinode.zombies.job import summaries

LIMIT_S = 60.0


def publish(config: Config, period: Period, result: WasteResult, fingerprint: str) -> int:
    """Write the pages of a report as ``nightly`` does; return the number of users with pages."""
    record = ReportRecord(period.kind, period.label, period.since, period.until, period.path, period.until, fingerprint)
    with Repository.open(config.db_url) as store:
        samples = SampleStore(config.history_dir)
        try:
            pages = UsagePages(config, store, samples, config.reports_dir, period.until, summaries)
            pages.publish(period, result, newest=True)
            return pages.finish([record], lambda _: result)
        finally:
            samples.close()


def seconds(function: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def write_again(pages: Path, target: Path, pattern: str) -> tuple[float, int]:
    """Write files with the contents of those that match ``pattern``; return seconds and the number of files."""
    contents = [(path.relative_to(pages), path.read_bytes()) for path in pages.rglob(pattern) if path.is_file()]

    def write() -> None:
        for name, content in contents:
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    return seconds(write), len(contents)


def analyzed(config: Config, until: datetime) -> WasteResult:
    """Return the result of the whole history; it is not measured."""
    return analyse_stored(config, WasteQuery(START, until), now=until)


def main() -> int:
    """Build, run and print; return ``MISSED`` if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="print where the first night spends its time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="affinode-bench-") as temporary:
        root = Path(temporary)
        build(root / "state", arguments.jobs, arguments.days, arguments.users)
        until = START + timedelta(days=arguments.days)
        toml = f'[nightly.pages]\ndirectory = "{root / "pages"}"\nurl = "../pages"\n'
        config = replace(parse(toml, where="benchmark"), store=StoreConfig(state_dir=root / "state"))
        result = analyzed(config, until)
        period = Period("week", "2026-W45", START, until)
        profile = cProfile.Profile()
        if arguments.profile:
            profile.enable()
        first = seconds(lambda: publish(config, period, result, "first"))
        profile.disable()
        pages = root / "pages"
        users, jobs = len(list(pages.glob("user/*/week.html"))), len(list(pages.glob("user/*/job-*.html")))
        again = seconds(lambda: publish(config, period, result, "second"))
        writing, _ = write_again(pages, root / "peer", "*")
        writing_users, files = write_again(pages, root / "peer-users", "[!j]*.*")
    print(f"pages of {users:,} users and {jobs:,} jobs; {result.jobs.height:,} job runs")
    print(f"first night     {first:7.2f} s   (limit {LIMIT_S:g} s)   writing the same files {writing:.2f} s")
    print(f"pages of users  {again:7.2f} s   writing the same {files:,} files {writing_users:.2f} s")
    if arguments.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
    report(first_to_writing=first / writing, next_to_writing=again / writing_users)
    return 0 if first <= LIMIT_S else MISSED


if __name__ == "__main__":
    sys.exit(main())
