"""Reports without names: no original name in any file, stable pseudonyms, the key of a site."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest
from waste_samples import make_result

from slurm_affinode.analysis.measures import GPUS
from slurm_affinode.analysis.result import QualityIssue, WasteResult
from slurm_affinode.analysis.suspensions import SUSPENSIONS
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.pipeline.anonymity import KEY_NAME, Pseudonyms, read_key, site_key
from slurm_affinode.report.output import write_report

KEY = b"0123456789abcdef"
NAMES = re.compile(r"\b(user|project|train)\d\d\b|secret")
NODES = re.compile(r"\bnode\d\d\b")


@pytest.fixture(scope="module")
def result() -> WasteResult:
    """A week in which every part of a report that can name a user does."""
    made = make_result()
    asleep = pl.DataFrame(
        [{"cluster": "alpha", "job_id": 40001, "user": "user01", "account": "project01", "partition": "gpu00",
          "outcome": "failed", "gpus": 1, "began": datetime(2026, 11, 2, tzinfo=UTC), "node": "node01",
          "restored_node": "node02", "failure": "/home/secret/model.bin is open"}],
        schema=SUSPENSIONS,
    )  # fmt: skip
    gpus = pl.DataFrame([{"cluster": "alpha", "node": "node03", "gpu": "0", "gpu_hours_allocated": 5.0,
                          "gpu_hours_idle": 2.0}], schema=GPUS)  # fmt: skip
    issue = QualityIssue("gaps", "Gaps", "Gaps of metrics", 1, 1.0, ("job 40001 of user01 on node01",))
    return replace(
        made,
        suspensions=asleep,
        gpus=gpus,
        quality=replace(made.quality, issues=(issue,)),
        query=replace(made.query, users=("user01",), accounts=("project01",)),
    )


def files(result: WasteResult, out: Path) -> dict[str, str]:
    """Name -> content of everything that a report writes; the definitions have examples of names."""
    write_report(result, out, csv=True)
    return {path.name: path.read_text() for path in out.iterdir()}


@pytest.mark.parametrize("nodes", [False, True])
def test_no_name_is_in_page_summary_and_tables(result: WasteResult, tmp_path: Path, *, nodes: bool) -> None:
    """Names of nodes stay unless they are to be replaced."""
    named = files(result, tmp_path / "named")
    assert all(NAMES.search(named[name]) for name in ("report.html", "summary.json", "jobs.csv", "users.csv"))
    anonymous = files(Pseudonyms(KEY, nodes=nodes).apply(result), tmp_path / "anonymous")
    assert anonymous.keys() == named.keys()
    for name, text in anonymous.items():
        assert NAMES.findall(name + text) == []
        assert bool(NODES.search(text)) == (not nodes and bool(NODES.search(named[name])))


def test_figures_do_not_change(result: WasteResult) -> None:
    anonymous = Pseudonyms(KEY, nodes=True).apply(result)
    assert anonymous.total == result.total
    hours = [name for name in result.jobs.columns if name.startswith("gpu_hours")]
    assert anonymous.jobs.select(hours).equals(result.jobs.select(hours))
    users = anonymous.groups["user"]
    assert users["name"].n_unique() == result.groups["user"]["name"].n_unique()
    assert users["gpu_hours_idle"].equals(result.groups["user"]["gpu_hours_idle"])


def test_pseudonyms_depend_on_the_key_alone() -> None:
    """The same in every report; users and accounts of one name differ; without the key they cannot be computed."""
    names = Pseudonyms(KEY)
    assert names.of("user", "ann") == Pseudonyms(KEY).of("user", "ann")
    assert len({names.of("user", "ann"), names.of("account", "ann"), Pseudonyms(KEY * 2).of("user", "ann")}) == 3
    assert (names.of("node", "n1"), names.fingerprint) != (
        Pseudonyms(KEY, nodes=True).of("node", "n1"), Pseudonyms(KEY, nodes=True).fingerprint,
    )  # fmt: skip


def test_unknown_users_stay_unknown(result: WasteResult) -> None:
    jobs = result.jobs.with_columns(pl.lit(None, pl.String).alias("user"))
    assert Pseudonyms(KEY).apply(replace(result, jobs=jobs)).jobs["user"].null_count() == jobs.height


def test_key_of_the_site_is_created_once_for_its_owner(tmp_path: Path) -> None:
    first = site_key(tmp_path / "state")
    path = tmp_path / "state" / KEY_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (site_key(tmp_path / "state"), read_key(path)) == (first, first)


def test_short_or_missing_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(AffinodeError, match="No such file"):
        read_key(path)
    path.write_text("short\n")
    with pytest.raises(AffinodeError, match="has 5 bytes: a key has at least 16"):
        read_key(path)


def test_key_of_a_site_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is ended before the key is complete leaves none, and a key of another process is kept."""

    def ended(_source: Path, _path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", ended)
        with pytest.raises(KeyboardInterrupt):
            site_key(tmp_path)
    assert list(tmp_path.iterdir()) == []
    key = site_key(tmp_path)
    monkeypatch.setattr(Path, "exists", lambda _path: False)  # as for two processes that begin at the same time
    assert site_key(tmp_path) == key
    assert [path.name for path in tmp_path.iterdir()] == ["pseudonyms.key"]
    assert (tmp_path / "pseudonyms.key").stat().st_mode & 0o777 == 0o600
