"""The section on model servers: rows, links, costs, and what is unknown."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import waste_samples
from server_samples import START, server_report

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.engines.diagnosis.rules import SIGNATURE_NOTE
from slurm_affinode.engines.diagnosis.usage import ServerReport
from slurm_affinode.report import output, servers_section
from slurm_affinode.report.pages import render_report
from slurm_affinode.report.servers_page import page_name, pages
from slurm_affinode.report.summary import build_summary

WEEK = WasteQuery(waste_samples.SINCE, waste_samples.UNTIL)


def made(report: ServerReport, query: WasteQuery = WEEK, top: int = 15):
    return servers_section.section(report, query, top)


def test_no_section_without_engines():
    assert made(ServerReport((), ())) is None
    page = render_report(waste_samples.make_result(5), title="x", top=5)
    assert 'id="servers"' not in page
    assert "Model servers" not in page


def test_row_has_figures_and_diagnoses():
    report = server_report()
    result = made(report)
    busy, lazy, fine, mute = result.engines.rows
    assert [cell.text for cell in busy[:9]] == [
        "vllm at busy:8000", "4711", "2", "19m\xa045s", "2,370", "99\xa0%", "1,770", "0", "0",
    ]  # fmt: skip
    assert busy[9].items == (
        "queue-unstable, 2026-11-03 08:05:00–08:19:45, 80\xa0%", "kv-saturated, 2026-11-03 08:05:00–08:19:45, 80\xa0%",
    )  # fmt: skip
    assert (lazy[8].text, lazy[8].sub) == ("0.50", "37.8\xa0GiB\xa0h")
    assert fine[9].text == "no problem"
    assert mute[3].text == "9m\xa045s"
    assert {cell.text for cell in (mute[2], *mute[4:])} == {"unknown"}
    assert result.lead == (
        "4 inference engines of 2 users: 1 engine had a critical diagnosis, 1 engine had a warning. "
        "0.50\xa0GPU-hours passed without requests, holding 37.8\xa0GiB\xa0h of GPU memory."
    )


def test_report_of_one_day_omits_dates():
    day = datetime(2026, 11, 3, tzinfo=UTC)
    result = made(server_report(), WasteQuery(day, day + timedelta(days=1)))
    assert result.engines.rows[0][9].items[0] == "queue-unstable, 08:05:00–08:19:45, 80\xa0%"


def test_costs_are_listed_with_advice():
    result = made(server_report())
    kinds = [row[0].text for row in result.diagnoses.rows]
    assert kinds[0] == "queue-unstable"
    assert set(kinds) == {"queue-unstable", "kv-saturated", "idle", "squatter-signature"}
    idle = result.diagnoses.rows[kinds.index("idle")]
    assert idle[3].text == "0.50"
    assert idle[4].items == ("37.8\xa0GiB\xa0h of GPU memory held",)
    assert "use its sleep mode" in idle[5].text


def test_signature_is_shown_with_the_remark_on_power():
    """On the section and on the page of the server; not where the diagnosis is missing."""
    report = server_report()
    assert made(report).doubt == SIGNATURE_NOTE
    page = pages(report, WEEK, START, "report.html")[page_name(report.engines[1].health)]
    assert "Power, which the published signature includes, does not count." in page
    assert "this GPU draws little" in page
    assert made(replace(report, engines=report.engines[2:])).doubt == ""


def test_rows_beyond_the_limit_are_announced():
    result = made(server_report(timelines=1), top=2)
    assert result.engines.note == "The first 2 of 4."
    assert [bool(row[0].href) for row in result.engines.rows] == [True, False], "only engines with a page are links"


def test_note_on_the_origin_is_shown_on_every_page():
    report = server_report(note="recorded elsewhere")
    assert made(report).note == "recorded elsewhere"
    assert all("recorded elsewhere" in text for text in pages(report, WEEK, START, "report.html").values())


def test_hostile_names_are_escaped_and_name_no_file():
    """The name of a page is a number; nothing a user chose becomes markup or part of a link."""
    report = server_report(waste_samples.HOSTILE)
    result = replace(waste_samples.make_result(5), servers=report)
    texts = [render_report(result, title="x", top=5), *pages(report, WEEK, START, "report.html").values()]
    for text in texts:
        assert text.count("<script>") == 1
        assert "<img" not in text
        links = re.findall(r'<a href="([^"]*)"', text)
        assert all(re.fullmatch(r"#[\w-]+|report\.html|server-[0-9a-f]{16}\.html", link) for link in links)


def test_pages_are_written_next_to_the_report_and_old_ones_removed(tmp_path):
    """Other files remain, also those with similar names."""
    result = replace(waste_samples.make_result(5), servers=server_report())
    output.write_report(result, tmp_path, csv=True)
    names = {path.name for path in tmp_path.glob("server-*.html")}
    assert len(names) == 4
    linked = set(re.findall(r'href="(server-[^"]*)"', (tmp_path / "report.html").read_text()))
    assert linked == names
    rows = (tmp_path / "servers.csv").read_text().splitlines()
    assert len(rows) == 5
    assert rows[0].startswith("cluster,node,address,engine,model")
    (tmp_path / "server-mine.html").write_text("mine")
    output.write_report(replace(result, servers=None), tmp_path)
    assert {path.name for path in tmp_path.glob("server-*.html")} == {"server-mine.html"}


def test_pages_and_summary_stay_small_with_thousands_of_diagnoses():
    """The most severe ones are shown, in the order of their time, and the omission is announced."""
    report = server_report(timelines=1)
    first = report.engines[0]
    [severe] = [diagnosis for diagnosis in first.health.diagnoses if diagnosis.severity == "critical"]
    mild = [
        replace(first.health.diagnoses[0], since=START + timedelta(minutes=n), until=START + timedelta(minutes=n + 1))
        for n in range(5000)
    ]
    health = replace(first.health, diagnoses=(*mild, severe))
    many = replace(report, engines=(replace(first, health=health),))
    [page] = pages(many, WEEK, START, "report.html").values()
    assert len(page) < 500_000
    assert "The 100 most severe and longest of 5,001 diagnoses are shown." in page
    assert page.count("<h3>queue-unstable</h3>") == 1
    result = replace(waste_samples.make_result(5), servers=many)
    [listed] = build_summary(result)["servers"]["list"]
    assert len(listed["diagnoses"]) == 100
    assert listed["diagnoses"][-1]["kind"] == "queue-unstable"
    assert build_summary(result)["servers"]["diagnoses"][1]["episodes"] == 5000


def test_page_is_named_after_the_identity_of_the_engine():
    first, other = (server_report().engines[i].health for i in (0, 1))
    assert page_name(first) == page_name(replace(first, job="99", user="eve", diagnoses=()))
    assert page_name(first) != page_name(other)
    assert page_name(first) != page_name(replace(first, key=replace(first.key, rank="1")))
