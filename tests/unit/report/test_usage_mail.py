"""Mails about the use of GPUs in a period."""

from __future__ import annotations

import dataclasses
import re
import tomllib
import unicodedata
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import polars as pl
import pytest

from slurm_affinode.analysis.emissions import EmissionFactor
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.analysis.working_hours import HOURS
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.model.cleanup import MailPolicy
from slurm_affinode.report.mail import MAX_LINES, Digest
from slurm_affinode.report.usage_mail import UsagePeriod, UsageScope, idle_hours, usage_digest

WEEK = UsagePeriod("week", "2026-W46")
NOW = datetime(2026, 11, 16, 5, tzinfo=UTC)


def most_idle(result: WasteResult, kind: str = "user") -> str:
    return str(result.groups[kind]["name"][0])


def mail(
    result: WasteResult, scope: UsageScope, policy: MailPolicy | None = None, *, user: str | None = None, **options: Any
) -> Digest:
    made = usage_digest(
        result, scope, options.pop("period", WEEK), policy or MailPolicy(), recipient="a@example.org", user=user,
        now=NOW, **options,
    )  # fmt: skip
    assert made is not None
    return made


def test_mail_to_a_user_has_own_figures_jobs_and_advice(result: WasteResult) -> None:
    user = most_idle(result)
    row = result.groups["user"].row(0, named=True)
    made = mail(result, UsageScope("user", user), user=user, can_opt_out=True)
    assert made.subject.startswith("Your GPU jobs, week 2026-W46: ")
    assert f"{row['gpu_hours_idle']:,.0f} GPU-h were idle" in made.text
    assert f"Hello {user}," in made.text
    jobs = result.jobs.filter(pl.col("user") == user)
    assert f"slurm-affinode job {jobs['job_id'][0]}: " in made.text
    assert "Place by idle GPU-hours: 1 of " in made.text
    assert "slurm-affinode mail off" in made.text
    assert "slurm-affinode mail off" not in mail(result, UsageScope("user", user), user=user).text


def test_mail_to_a_user_names_no_other(result: WasteResult) -> None:
    """Neither names nor job IDs of others."""
    users = [str(name) for name in result.groups["user"]["name"]]
    for user in users:
        made = mail(result, UsageScope("user", user), user=user)
        others = [name for name in users if name != user and not user.startswith(name)]
        assert [name for name in others if name in made.text + made.html] == []
        user_rows = result.jobs.filter(pl.col("user") == user).rows(named=True)
        jobs = {str(row["job_id"]) for row in user_rows} | {
            f"{row['array_job_id']}_{row['array_task_id']}" for row in user_rows
        }
        words = {line.split(":")[0].split()[-1] for line in made.text.splitlines() if "slurm-affinode job" in line}
        assert words <= jobs


def test_mail_about_an_account_lists_its_users(result: WasteResult) -> None:
    account = most_idle(result, "account")
    made = mail(result, UsageScope("account", account))
    inside = result.jobs.filter(pl.col("account") == account)["user"].unique().to_list()
    listed = made.text.partition("Users with the most idle GPU-hours:")[2].partition("\n\n")[0]
    names = {line[2:].partition(":")[0] for line in listed.strip().splitlines()}
    assert names
    assert names <= set(inside)


def test_mail_has_a_picture_of_the_states(result: WasteResult, unmeasured: WasteResult) -> None:
    """A bar whose parts are all of the allocated time. There is none if nothing was measured."""
    made = mail(result, UsageScope("site"))
    widths = [float(width) for width in re.findall(r'<td title="[^"]+" width="([\d.]+)%"', made.html)]
    assert len(widths) == 4
    assert sum(widths) == pytest.approx(100, abs=0.2)
    idle = 100 * float(result.total["gpu_hours_idle"] or 0) / float(result.total["gpu_hours_allocated"] or 1)
    assert f'role="img" aria-label="Busy {widths[0]} %, ' in made.html
    assert widths[2] == pytest.approx(idle, abs=0.1)
    assert 'role="img"' not in mail(unmeasured, UsageScope("site")).html


@pytest.mark.parametrize("language", ["en", "de"])
@pytest.mark.parametrize("kind", ["site", "account", "user"])
def test_mail_has_at_most_forty_lines_in_every_language(result: WasteResult, kind: Any, language: str) -> None:
    """Also with energy, emissions, costs and links; no placeholder is left."""
    names = {"site": "", "user": most_idle(result), "account": most_idle(result, "account")}
    total = {**result.total, "idle_energy_kwh": 2.0}
    groups = {
        word: frame.with_columns(idle_energy_kwh=pl.lit(2.0), idle_cost=pl.lit(3.0))
        for word, frame in result.groups.items()
    }
    rows = [("working", 50.0, 50.0, 10.0, 0.0, 40.0, 0.0), ("other", 118.0, 100.0, 30.0, 0.0, 70.0, 0.0)]
    full = dataclasses.replace(
        result, emissions=EmissionFactor(30.0, "test"), total=total, groups=groups,
        working_hours=pl.DataFrame(rows, schema=HOURS, orient="row"),
    )  # fmt: skip
    made = mail(
        full, UsageScope(kind, names[kind]), MailPolicy(language=language, help_url="https://example.org"),
        user=names["user"] if kind == "user" else None, can_opt_out=True, page="https://example.org/page",
    )  # fmt: skip
    assert len(made.text.splitlines()) <= MAX_LINES
    assert "{" not in made.text + made.html.partition("<body")[2].partition(">")[2]
    assert f'lang="{language}"' in made.html
    assert "CO2e" in made.text
    assert ("30 GPU-h (75 %)" in made.text) == (kind == "site")
    if language == "de":
        english = [row["title"] for row in tomllib.loads((asset_dir("reports") / "actions.toml").read_text()).values()]
        assert [title for title in english if title in made.text] == []


@pytest.mark.parametrize(
    ("language", "text"), [("en", "to smaller GPUs. 1 job run on"), ("de", "auf kleinere GPUs. 1 Lauf auf")]
)
def test_mail_reports_hours_that_move_to_smaller_gpus(samples: ModuleType, language: str, text: str) -> None:
    """They are not called returned. The text is translated with its placeholders."""
    made = mail(samples.oversized_result(), UsageScope("site"), MailPolicy(language=language))
    lines = " ".join(made.text.replace("\xa0", " ").split())
    assert f"30 GPU-h {text} NVIDIA H100 80GB HBM3 (79.6 GiB)" in lines
    assert ("NVIDIA A30 hat 24 GiB" if language == "de" else "NVIDIA A30 has 24 GiB") in lines
    assert "mindestens 30" not in lines
    assert "at least 30" not in lines


@pytest.mark.parametrize("kind", ["day", "week", "month"])
def test_period_is_named(result: WasteResult, kind: str) -> None:
    made = mail(result, UsageScope("site"), period=UsagePeriod(kind, "LABEL"))
    assert {"day": "On LABEL,", "week": "In week LABEL,", "month": "In LABEL,"}[kind] in made.text


def test_unmeasured_use_is_unknown(unmeasured: WasteResult) -> None:
    scope = UsageScope("user", most_idle(unmeasured))
    made = mail(unmeasured, scope, user=scope.name)
    assert "How much was idle is unknown." in made.text
    assert made.subject.endswith("use unknown")
    assert idle_hours(unmeasured, scope) is None


def test_user_without_jobs_gets_no_mail(result: WasteResult, samples: ModuleType) -> None:
    assert usage_digest(
        result, UsageScope("user", "nobody-here"), WEEK, MailPolicy(), recipient="a", user=None, now=NOW
    ) is None  # fmt: skip
    empty = samples.empty_result()
    assert usage_digest(empty, UsageScope("site"), WEEK, MailPolicy(), recipient="a", user=None, now=NOW) is None


def test_hostile_names_are_text(hostile: WasteResult) -> None:
    for name in hostile.groups["user"]["name"].drop_nulls().to_list():
        made = mail(hostile, UsageScope("user", name), user=name)
        assert "<script" not in made.html.partition("<body")[2]
        assert {ch for ch in made.text if unicodedata.category(ch) == "Cc" or ch == "\u202e"} == {"\n"}
        assert "\n" not in made.subject
