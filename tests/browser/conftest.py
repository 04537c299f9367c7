"""Chromium and pages for the browser tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, timedelta
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import waste_samples
from click.testing import CliRunner
from job_samples import job_summary
from playwright.sync_api import Browser, Page, sync_playwright
from server_samples import server_report

from slurm_affinode.analysis.portions import Rank, portions
from slurm_affinode.analysis.result import PeriodHours, Thresholds, Trend, WasteResult
from slurm_affinode.cli.main import cli
from slurm_affinode.demo import histories
from slurm_affinode.demo.histories import build_demo
from slurm_affinode.report import job_page, servers_page, usage_page
from slurm_affinode.report.archive_index import IndexEntry, render_index
from slurm_affinode.report.links import Links
from slurm_affinode.report.pages import render_report
from slurm_affinode.report.usage_page import UsagePage

CHROMIUM = Path("/usr/bin/chromium")
Open = Callable[..., Page]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here need Chromium; without it they are skipped, but never in continuous integration."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if not CHROMIUM.exists() and os.environ.get("CI") != "true":
                item.add_marker(pytest.mark.skip(reason=f"there is no {CHROMIUM}"))


@pytest.fixture(scope="session")
def samples() -> ModuleType:
    """``tests/waste_samples.py``."""
    return waste_samples


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests, without a sandbox so that it also runs as root in a container."""
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory, samples: ModuleType) -> dict[str, Path]:
    """Rendered reports: an ordinary week, hostile names, ten thousand jobs, no GPU metrics, no jobs, model servers,
    and a few jobs, for checks that take long.

    ``server`` is the page of an overloaded server, ``hostile-server`` that of one with a hostile model name; ``job``
    and ``hostile-job`` are pages of single jobs, ``user`` and ``account`` those of their owners; ``index`` lists
    reports. ``finding``, ``whatif``, ``log`` and ``requests`` are made by commands, of synthetic data.
    """
    made = {
        "week": samples.make_result(),
        "hostile": samples.make_result(names=samples.HOSTILE),
        "many": samples.make_result(10_000),
        "unmeasured": samples.make_result(measured=False, priced=False),
        "empty": samples.empty_result(),
        "servers": replace(samples.make_result(), servers=server_report(samples.HOSTILE)),
        "small": replace(samples.make_result(12), servers=server_report()),
    }
    folder = tmp_path_factory.mktemp("pages")
    paths = {}
    for name, result in made.items():
        paths[name] = folder / f"{name}.html"
        paths[name].write_text(render_report(result, title="GPU waste report", top=15), encoding="utf-8")
    for name, names in (("server", ()), ("hostile-server", samples.HOSTILE)):
        report = server_report(names, note="Recorded elsewhere.")
        engine = report.engines[0]
        texts = servers_page.pages(report, made["week"].query, made["week"].generated, "report.html")
        paths[name] = folder / f"{name}.html"
        paths[name].write_text(texts[servers_page.page_name(engine.health)], encoding="utf-8")
    for name, names in (("job", ()), ("hostile-job", samples.HOSTILE)):
        paths[name] = folder / f"{name}.html"
        paths[name].write_text(job_page.render(job_summary(names), UTC, Thresholds()), encoding="utf-8")
    whole = made["week"]
    periods = [
        PeriodHours(f"2026-W{44 - n}", whole.query.since - timedelta(days=7 * (n + 1)),
                    whole.query.since - timedelta(days=7 * n), dict(whole.groups["user"].row(n, named=True)))
        for n in (2, 1, 0)
    ]  # fmt: skip
    for by, name in (("user", "user00"), ("account", "project00")):
        portion = replace(dict(portions(whole, by))[name], trend=Trend("week", tuple(periods)))
        keys = portion.jobs.select("cluster", "job_id", "submit").head(3).rows()
        links = Links({key: f"job-{key[1]}.html" for key in keys})
        about = UsagePage(by, name, "week", "2026-W45", ("day", "week", "month"))
        paths[by] = folder / f"{by}.html"
        paths[by].write_text(usage_page.render(portion, about, rank=Rank(2, 24, 0.3), links=links), encoding="utf-8")
    paths["index"] = folder / "index.html"
    paths["index"].write_text(render_index(_index_entries(whole)), encoding="utf-8")
    return paths | _by_commands(folder)


def _by_commands(folder: Path) -> dict[str, Path]:
    """Return the pages of commands that need stored data or a log."""
    build_demo(folder / "demo", histories.synthetic(days=3, seed=7))
    log, requests = folder / "log.swf", folder / "requests.csv"
    lines = [f"{n} {600 * n} {9 * n} {120 * n} 2 -1 -1 2 9000 -1 1 {n % 5} 1 -1 -1 -1 -1 -1" for n in range(1, 80)]
    log.write_text("; MaxProcs: 64\n; UnixStartTime: 1762000000\n" + "\n".join(lines) + "\n")
    rows = [f"2023-11-16 18:{n // 60:02d}:{n % 60:02d}.0000000,{50 * n},{5 * n}" for n in range(1, 600)]
    requests.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    state = ("--state", folder / "demo" / "state")
    made = {name: folder / name / "report.html" for name in ("finding", "whatif", "log", "requests")}
    for words in (
        ("zombies", "explain", "4273", *state, "--html", made["finding"]),
        ("whatif", "--since", "2026-11-02", "--until", "2026-11-05", "--sweep", *state, "--html", made["whatif"]),
        ("trace", "swf", log, "--out", made["log"].parent),
        ("trace", "azure", requests, "--out", made["requests"].parent),
    ):
        if "--html" in words:
            Path(words[-1]).parent.mkdir()
        done = CliRunner().invoke(cli, list(map(str, words)))
        assert done.exit_code == 0, done.output + repr(done.exception)
    return made | {"demo": folder / "demo" / "report.html"}


def _index_entries(result: WasteResult) -> list[IndexEntry]:
    """Forty days, six weeks and a month of two clusters."""
    lengths = [("day", 1, f"2026-11-{n + 1:02d}", n) for n in range(28)]
    lengths += [("week", 7, f"2026-W{45 + n}", 7 * n + 1) for n in range(4)] + [("month", 30, "2026-11", 0)]
    total = dict(result.total)
    parts = {name: {key: value * share if isinstance(value, float) else value for key, value in total.items()}
             for name, share in (("alpha", 0.75), ("beta", 0.25))}  # fmt: skip
    begin = result.query.since
    return [
        IndexEntry(kind, label, begin + timedelta(days=first), begin + timedelta(days=first + days),
                   f"{kind}/{label}/report.html", total, "EUR", parts)
        for kind, days, label, first in lengths
    ]  # fmt: skip


@pytest.fixture
def open_page(browser: Browser, pages: dict[str, Path]) -> Iterator[Open]:
    """Open a report by name; the test fails on console messages, page errors, dialogs and requests beyond the file."""
    contexts = []
    trouble: list[str] = []

    def opened(name: str, **settings: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        contexts.append(context)
        page = context.new_page()
        target = pages[name].as_uri()
        page.on("console", lambda message: trouble.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request",
            lambda request: None if request.url in (target, "data:,") else trouble.append(f"request: {request.url}"),
        )
        page.goto(target)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert trouble == []


@pytest.fixture
def violations() -> Callable[[Page], list[Any]]:
    """Return what axe-core finds on a page: rule and elements. The page needs ``bypass_csp``."""

    def check(page: Page) -> list[Any]:
        page.evaluate(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
        evaluation: list[Any] = page.evaluate(
            "axe.run(document).then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html)]))"
        )
        return evaluation

    return check
