"""Pages of users, accounts and jobs: contents, links, access rules, nothing of others, retention."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from slurm_affinode.base.config import Config, StoreConfig, parse
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.pipeline import stored_accounting, usage_pages
from slurm_affinode.pipeline.nightly import NightlyOutcome, Sources, run
from slurm_affinode.slurm.accounting.schema import JOBS, conform
from slurm_affinode.zombies.job import summaries

NOW = datetime(2026, 11, 20, 4, 15, tzinfo=UTC)
USERS = ("ann", "bob", "cyd", "dee", "eve", "fay")
ACCOUNTS = {"ann": "physics", "bob": "physics", "cyd": "chemistry", "dee": "chemistry", "eve": "biology",
            "fay": "biology"}  # fmt: skip
TOML = """[cluster]
timezone = "UTC"
[nightly.pages]
directory = "{0}/pages"
url = "../../pages"
accounts = {{physics = ["pat"]}}
"""


class Site:
    """Six users on a node of six GPUs, each with a job in October, in week 46 and yesterday; all of them idle."""

    def __init__(self, path: Path, util_pct: float = 0.0, fb_used_mib: float | None = None) -> None:
        self.path, self.now, self.toml = path, NOW, TOML.format(path)
        starts = [datetime(2026, 10, 7, 10, tzinfo=UTC), datetime(2026, 11, 11, 10, tzinfo=UTC),
                  datetime(2026, 11, 19, 10, tzinfo=UTC)]  # fmt: skip
        rows, samples = [], []
        for at, start in enumerate(starts):
            for number, user in enumerate(USERS):
                job = 471000 + 100 * at + number
                rows.append(row(job, user, start, hours=2 + number / 10))
                times = [start + timedelta(minutes=5 * n) for n in range(24 - number)]
                samples.append(
                    pl.DataFrame({"time": times}).with_columns(
                        cluster=pl.lit("c"), node=pl.lit("n1"), uuid=pl.lit(f"GPU-{number}"),
                        util_pct=pl.lit(util_pct), fb_used_mib=pl.lit(fb_used_mib), job=pl.lit(str(job)),
                    )
                )  # fmt: skip
        self.add(*rows)
        frame = pl.concat(samples)
        columns = [
            (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
            for name, dtype in SAMPLES.items()
        ]
        store = SampleStore(self.config.history_dir)
        store.ingest(frame.select(columns), source="test")
        store.close()

    @property
    def config(self) -> Config:
        return replace(parse(self.toml, where="test"), store=StoreConfig(state_dir=self.path / "state"))

    @property
    def pages(self) -> Path:
        return self.path / "pages"

    def add(self, *rows: dict[str, Any]) -> None:
        with Repository.open(self.config.db_url) as store:
            store.upsert(conform(pl.DataFrame(rows, schema_overrides={"submit": JOBS["submit"]}), JOBS))

    def night(self, **options: Any) -> NightlyOutcome:
        def accounting(store: Repository, _earliest: datetime, now: datetime) -> list[str]:
            stored_accounting.reached(store, now, ["c"])
            return []

        sources = Sources(accounting, lambda *_: [], lambda *_: [])
        out = self.config.reports_dir
        return run(self.config, sources, out=out, now=self.now, **{"summarize": summaries, **options})

    def report(self) -> str:
        return (self.config.reports_dir / "day/2026-11-19/report.html").read_text()


def row(job: int, user: str, start: datetime, *, hours: float = 2.0) -> dict[str, Any]:
    end = start + timedelta(hours=hours)
    return {
        "cluster": "c", "job_id": job, "submit": start, "start": start, "end": end, "user": user,
        "account": ACCOUNTS.get(user, "other"), "job_name": f"train-{user}", "gpus": 1, "state": "COMPLETED",
        "nodes": 1, "node_list": "n1", "elapsed_s": int(hours * 3600), "partition": "gpu",
    }  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A site after its first night; not changed by tests."""
    site = Site(tmp_path_factory.mktemp("site"))
    outcome = site.night()
    assert outcome.failures == ()
    assert outcome.page_users == len(USERS)
    return site


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_each_user_gets_pages_of_all_periods_and_own_jobs(made: Site) -> None:
    """The page of the week is the first one; jobs link to their pages in the same directory."""
    user_pages = made.pages / "user" / "bob"
    jobs = {f"job-c-{job}-{int(start.timestamp())}.html" for job, start in (
        (471001, datetime(2026, 10, 7, 10, tzinfo=UTC)), (471101, datetime(2026, 11, 11, 10, tzinfo=UTC)),
        (471201, datetime(2026, 11, 19, 10, tzinfo=UTC)),
    )}  # fmt: skip
    assert names(user_pages) == {".htaccess", "index.html", "day.html", "week.html", "month.html", *jobs}
    day = (user_pages / "day.html").read_text()
    assert (user_pages / "index.html").read_text() == (user_pages / "week.html").read_text()
    assert re.findall(r'<a href="(job-c-471201-\d+\.html)"', day)
    link = re.compile(r'href="(day|week|month)\.html"( aria-current="page")?')
    assert [link.findall((user_pages / f"{kind}.html").read_text())
            for kind in ("day", "month")] == [
        [("day", ' aria-current="page"'), ("week", ""), ("month", "")],
        [("day", ""), ("week", ""), ("month", ' aria-current="page"')],
    ]  # fmt: skip
    assert "Place 2 of 6 users by idle GPU-hours" in day


def test_job_of_an_action_has_a_page_without_idle_hours(tmp_path: Path) -> None:
    """Of jobs that hold memory and hardly work, too: the report links to it."""
    site = Site(tmp_path, util_pct=1.0, fb_used_mib=20_480.0)
    site.night()
    head = site.report().partition('<section id="advice"')[2].partition("</section>")[0]
    assert "hardly any work" in head
    linked = re.findall(r'href="\.\./\.\./([^"]*job-c-\d+-\d+\.html)"', head)
    assert linked
    assert [link for link in linked if not (site.config.reports_dir / link).exists()] == []


def test_page_of_a_user_has_nothing_of_others(made: Site) -> None:
    """No other user's name, account, job ID or directory is in a user's files, nor in the names of the files."""
    for number, user in enumerate(USERS):
        others = {other for other in USERS if other != user} | {*ACCOUNTS.values()} - {ACCOUNTS[user]}
        others |= {str(471000 + 100 * at + other) for at in range(3) for other in range(len(USERS)) if other != number}
        others |= {f"GPU-{other}" for other in range(len(USERS)) if other != number} | {"pat"}
        word = re.compile(rf"(?<![\w])({'|'.join(map(re.escape, sorted(others)))})(?![\w])")
        files = list((made.pages / "user" / user).iterdir())
        assert len(files) == 8
        for path in files:
            body = re.sub(r"<(style|script)>.*?</\1>", "", path.read_text(), flags=re.DOTALL)
            assert word.findall(path.name + body) == []


def test_only_listed_accounts_have_pages_with_their_users(made: Site) -> None:
    assert names(made.pages / "account") == {"physics"}
    page = (made.pages / "account/physics/day.html").read_text()
    assert "<bdi>ann</bdi>" in page
    assert "<bdi>bob</bdi>" in page
    assert not re.search(rf"\b({'|'.join(USERS[2:])}|chemistry|biology)\b", page)


def test_page_of_an_account_links_to_jobs_that_its_readers_may_read(made: Site) -> None:
    """The pages of its jobs are in its directory too, because those of its users are closed to its readers."""
    account = made.pages / "account/physics"
    page = (account / "day.html").read_text()
    links = set(re.findall(r'href="([^"#]*job-[^"]*)"', page))
    assert {re.sub(r"-\d+\.html", "", link) for link in links} == {"job-c-471200", "job-c-471201"}
    for link in links:
        (owner,) = (made.pages / "user").glob(f"*/{link}")
        assert (account / link).read_text() == owner.read_text()
    assert {path.name for path in account.glob("job-*")} == {
        path.name for user in ("ann", "bob") for path in (made.pages / "user" / user).glob("job-*")
    }


def test_account_that_is_listed_later_gets_pages_of_jobs(tmp_path: Path) -> None:
    """With the next report that has them; an account that is no longer listed loses its directory."""
    site = Site(tmp_path)
    site.night()
    site.toml = site.toml.replace("physics = ", "chemistry = ")
    site.add(row(8000, "cyd", datetime(2026, 11, 19, 12, tzinfo=UTC)))  # the report of the day changes
    assert site.night().failures == ()
    assert names(site.pages / "account") == {"chemistry"}
    page = (site.pages / "account/chemistry/day.html").read_text()
    links = set(re.findall(r'href="(job-c-[^"]*)"', page))
    assert {re.sub(r"-\d+\.html", "", link) for link in links} == {"job-c-471202", "job-c-471203"}
    assert all((site.pages / "account/chemistry" / link).is_file() for link in links)


def test_site_keeps_pages_of_jobs_from_readers_of_accounts(tmp_path: Path) -> None:
    """The account's page has no links then, and earlier copies are deleted; owners keep their pages."""
    site = Site(tmp_path)
    site.night()
    owned = {path.name for path in (site.pages / "user/ann").iterdir()}
    assert list((site.pages / "account/physics").glob("job-*"))
    site.toml += "account_jobs = false\n"
    assert site.night().failures == ()
    account = site.pages / "account/physics"
    assert names(account) == {".htaccess", "index.html", "day.html", "week.html", "month.html"}
    assert "job-c-" not in "".join(path.read_text() for path in account.glob("*.html"))
    assert names(site.pages / "user/ann") == owned


def test_rules_of_access_name_owner_and_readers(made: Site) -> None:
    rules = {path.relative_to(made.pages).as_posix(): path.read_text().splitlines()[-1]
             for path in made.pages.rglob(".htaccess")}  # fmt: skip
    assert rules == {
        ".htaccess": "Require all denied", "account/physics/.htaccess": "Require user pat",
        **{f"user/{user}/.htaccess": f"Require user {user}" for user in USERS},
    }  # fmt: skip


def test_other_users_of_the_machine_can_read_nothing(made: Site) -> None:
    """Directories are for the service and its group, files too."""
    modes = {stat.S_IMODE(path.stat().st_mode) for path in made.pages.rglob("*") if path.is_file()}
    directories = {stat.S_IMODE(path.stat().st_mode) for path in (made.pages, *made.pages.rglob("*")) if path.is_dir()}
    assert (modes, directories) == ({0o640}, {0o750})


def test_group_of_the_root_is_inherited(tmp_path: Path) -> None:
    """With the set-group-ID bit, all directories belong to the group of the web server."""
    site = Site(tmp_path)
    site.pages.mkdir()
    if os.geteuid() == 0:
        os.chown(site.pages, -1, 33)
    site.pages.chmod(0o2750)
    assert site.night().failures == ()
    group = site.pages.stat().st_gid
    assert {path.stat().st_gid for path in site.pages.rglob("*")} == {group}


def test_report_links_to_pages_that_exist(made: Site) -> None:
    """Users and jobs; every link leads to a file. A field of the GPU map leads to the row of a job that has one."""
    links = set(re.findall(r'href="(\.\./[^"]+)"', made.report()))
    assert len({link for link in links if "/job-" in link}) == len(USERS)
    assert f"../../../../pages/user/{USERS[0]}/index.html" in links
    assert "../../../../pages/account/physics/index.html" in links
    assert all((made.config.reports_dir / "day/2026-11-19" / link).is_file() for link in links)
    field = re.search(r'<td class="h5"[^>]*><a href="#([^"]+)"', made.report())
    assert field is not None
    assert "/job-c-47120" in made.report().partition(f'<tr id="{field[1]}"')[2].partition("</tr>")[0]


def test_report_has_no_links_without_an_address(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.toml = site.toml.replace('url = "../../pages"\n', "")
    assert site.night().failures == ()
    assert "../" not in site.report()
    assert (site.pages / "user/ann/index.html").is_file()


def test_pages_are_made_once(made: Site, tmp_path: Path) -> None:
    """A second night has nothing to do; the pages of jobs of old periods are not made again."""
    site = Site(tmp_path)
    calls: list[int] = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments[3].height)
        return summaries(*arguments)

    site.night(summarize=counted)
    first = sum(calls)
    assert first == 3 * len(USERS)
    site.now += timedelta(minutes=5)
    assert site.night(summarize=counted).page_users == len(USERS)
    assert sum(calls) == first


def test_own_trend_comes_from_the_stored_tables(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.night()
    site.add(row(8000, "bob", datetime(2026, 11, 20, 10, tzinfo=UTC)))
    site.now += timedelta(days=1)
    assert site.night().failures == ()
    page = (site.pages / "user/bob/day.html").read_text()
    assert 'id="trend-h"' in page
    assert "2026-11-19" in page
    assert 'href="week.html"' in page


def test_user_without_a_run_in_a_period_keeps_the_other_pages(tmp_path: Path) -> None:
    """The page of the day says so; a user of no recent report who has no pages of jobs loses the directory."""
    site = Site(tmp_path)
    site.night()
    site.add(row(8000, "bob", datetime(2026, 11, 20, 10, tzinfo=UTC)))
    site.now += timedelta(days=1)
    site.night()
    assert "No GPU job ran in this interval." in (site.pages / "user/cyd/day.html").read_text()
    for start in (datetime(2026, 12, 30, 10, tzinfo=UTC), datetime(2027, 1, 12, 10, tzinfo=UTC),
                  datetime(2027, 1, 20, 10, tzinfo=UTC)):  # fmt: skip
        site.add(row(8000 + start.day, "bob", start))
    site.now = datetime(2027, 1, 21, 4, tzinfo=UTC)
    for path in site.pages.rglob("job-*.html"):
        os.utime(path, (site.now.timestamp() - 31 * 86400,) * 2)
    assert site.night().failures == ()
    assert names(site.pages / "user") == {"bob"}
    assert not list((site.pages / "user/bob").glob("job-c-47*"))


def test_names_that_are_no_plain_words_get_no_page(tmp_path: Path) -> None:
    """A name could otherwise leave the directory, or add a rule of access."""
    site = Site(tmp_path)
    hostile = ("../eve2", ".hidden", "a b", "x\nRequire all granted", "-x", "")
    start = datetime(2026, 11, 19, 12, tzinfo=UTC)
    site.add(*(row(9000 + n, name, start) for n, name in enumerate(hostile)))
    assert site.night().failures == ()
    assert names(site.pages / "user") == set(USERS)
    assert {path.name for path in site.path.iterdir()} == {"pages", "state"}


def test_directory_of_others_is_not_used(tmp_path: Path) -> None:
    """The reports are made nevertheless, without links."""
    site = Site(tmp_path)
    site.pages.mkdir()
    site.pages.chmod(0o777)
    outcome = site.night()
    assert len(outcome.rendered) == 3
    assert {failure.exit_code for failure in outcome.failures} == {3}
    assert "mode 2750" in str(outcome.failures[0].hint)
    assert "../" not in site.report()


def test_pages_are_made_where_the_reports_are_current(tmp_path: Path) -> None:
    """As after a night in which the directory could not be written."""
    site = Site(tmp_path)
    site.night()
    with Repository.open(site.config.db_url) as store:
        store.set(usage_pages._PUBLISHED, "{}")
    for path in (site.pages / "user").rglob("*.html"):
        path.unlink()
    outcome = site.night()
    assert (outcome.rendered, outcome.failures) == ((), ())
    assert (site.pages / "user/ann/week.html").is_file()
