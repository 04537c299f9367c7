"""The agent's metrics on the exporter's page."""

from __future__ import annotations

import getpass
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_stand_ins import Node1, agent, ask, config_of, watched
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until

from slurm_affinode.agent import daemon
from slurm_affinode.agent.client import ask_local
from slurm_affinode.agent.requests import Caller
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.model.suspension import Phase
from slurm_affinode.pipeline.exporter import AGENT_SCRAPE_S as SCRAPE_S
from slurm_affinode.pipeline.exporter import AGENT_UP as UP
from slurm_affinode.pipeline.exporter import AgentMetrics
from slurm_affinode.suspension import metrics


def of_agent(run_dir: Path) -> AgentMetrics:
    """Return the metrics of the agent with its socket there."""
    return AgentMetrics(run_dir, lambda: ask_local(run_dir, {"verb": "metrics"}), node="c1", cluster="c")


def scraped(scrape: AgentMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the samples of a scrape by name and labels, without those that each has."""
    registry = CollectorRegistry()
    registry.register(scrape)
    return {
        (sample.name, frozenset(sample.labels.items() - {("Hostname", "c1"), ("cluster", "c")})): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_metrics_of_an_agent_are_exported(tmp_path: Path) -> None:
    """Counters begin at 0; what is not known is absent."""
    with agent(config_of(tmp_path)) as node:
        node.acts.go.set()
        watched(node, option="window=1,when=always")
        wait_until("it is suspended", lambda: node.acts.suspended_jobs)
        outcome = wait_until("its outcome is known", lambda: node.daemon.work.outcome(7))
        assert outcome is not None
        result = scraped(of_agent(node.run_dir))
    assert result[UP, frozenset()] == 1.0
    assert result[SCRAPE_S, frozenset()] >= 0
    suspended = frozenset({("mode", "requeue"), ("outcome", "suspended")})
    assert result[metrics.SUSPENSIONS, suspended] == 1.0
    assert result[metrics.SUSPENSIONS, frozenset({("mode", "inplace"), ("outcome", "failed")})] == 0.0
    assert result[metrics.SAMPLES, frozenset()] > 0
    assert result[metrics.JOBS, frozenset({("state", "restoring")})] == 0.0
    assert sum(value for (name, _), value in result.items() if name == metrics.JOBS) == 1.0
    assert result[metrics.SLURM_UP, frozenset()] == 1.0
    assert result[metrics.JOURNALS, frozenset()] == 0.0
    assert result[metrics.JOB_INFO, frozenset({("hpc_job", "7"), ("user", getpass.getuser())})] == 1.0
    # Without stores, as in this test, their sizes are unknown.
    assert not any(name in (metrics.IMAGE_BYTES, metrics.IMAGES) for name, _ in result)


def test_agent_that_does_not_run_is_down(tmp_path: Path) -> None:
    """Its directory is there, as it is after a stop, or a start that has failed."""
    (tmp_path / "run").mkdir()
    result = scraped(of_agent(tmp_path / "run"))
    assert result[UP, frozenset()] == 0.0
    assert {name for name, _ in result} == {UP, SCRAPE_S}


def test_node_without_an_agent_has_no_metrics_of_one(tmp_path: Path) -> None:
    assert scraped(of_agent(tmp_path / "run")) == {}


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"metrics": 7},
        {"metrics": [{"name": "node_load1", "kind": "gauge", "help": "", "samples": []}]},
        {"metrics": [{"name": metrics.JOBS, "kind": "gauge", "help": "", "samples": [[{"a b": "c"}, 1.0]]}]},
        {"metrics": [{"name": metrics.JOBS, "kind": "gauge", "help": "", "samples": [[{}, "x"]]}]},
        {"metrics": [{"name": metrics.JOBS, "kind": "gauge", "help": "", "samples": [[{}, float("nan")]]}]},
        {"metrics": [{"name": metrics.JOBS, "kind": "summary", "help": "", "samples": []}]},
    ],
)
def test_reply_of_another_form_counts_as_none(tmp_path: Path, reply: Mapping[str, Any]) -> None:
    """A reply of a later release does not hide the metrics of the GPUs."""
    result = scraped(AgentMetrics(tmp_path, lambda: reply, node="c1", cluster=None))
    assert {name: value for (name, _), value in result.items() if name != SCRAPE_S} == {UP: 0.0}


def test_agent_that_does_not_respond_is_down(tmp_path: Path) -> None:
    def fail() -> Mapping[str, Any]:
        raise UnreachableError("it does not respond")

    result = scraped(AgentMetrics(tmp_path, fail, node="c1", cluster="c"))
    assert result[UP, frozenset()] == 0.0


def test_failed_suspension_is_counted_with_its_phase(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    suspend = node.acts.suspend
    monkeypatch.setattr(
        node.acts, "suspend",
        lambda *arguments, **named: replace(suspend(*arguments, **named), failure="bad", phase=Phase.DUMPING),
    )  # fmt: skip
    node.acts.go.set()
    watched(node, option="window=1,when=always")
    wait_until("it has failed", lambda: node.daemon.work.outcome(7))
    result = scraped(of_agent(node.run_dir))
    assert result[metrics.SUSPENSION_FAILURES, frozenset({("mode", "requeue"), ("phase", "dumping")})] == 1.0
    assert result[metrics.SUSPENSIONS, frozenset({("mode", "requeue"), ("outcome", "failed")})] == 1.0


def test_owner_of_a_job_is_exported_until_its_epilog(node: Node1) -> None:
    """Also of jobs without the option, which the prolog reports."""

    def owners() -> set[str]:
        result = scraped(of_agent(node.run_dir))
        return {dict(labels)["hpc_job"] for name, labels in result if name == metrics.JOB_INFO}

    ask(node, verb="prolog", job=12, uid=0, gpus=[0])
    assert owners() == {"12"}
    ask(node, verb="epilog", job=12)
    assert owners() == set()


def test_metrics_do_not_wait_for_a_directory_of_users(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """The UID is reported until the name is known, which is then not looked up again."""
    responds, looked_up = threading.Event(), []

    def name_of(uid: int) -> str:
        assert responds.wait(30)
        looked_up.append(uid)
        return "alice"

    def owners() -> set[str]:
        families = {metric["name"]: metric["samples"] for metric in ask(node, verb="metrics")["metrics"]}
        return {labels["user"] for labels, _ in families[metrics.JOB_INFO]}

    monkeypatch.setattr(node.daemon.service, "name_of", name_of)
    monkeypatch.setattr(daemon, "CALL_S", 0.1)
    ask(node, verb="prolog", job=12, uid=4711, gpus=[0])
    assert owners() == {"4711"}
    responds.set()
    wait_until("its name is known", lambda: owners() == {"alice"})
    before = len(looked_up)
    assert owners() == {"alice"}
    assert len(looked_up) == before


@pytest.mark.parametrize(("name", "shown"), [("alice", False), ("slurm-affinode-exporter", True), ("root", True)])
def test_owners_are_reported_to_the_exporter_and_administrators_only(node: Node1, name: str, shown: bool) -> None:
    """Slurm may hide the jobs of other users from a user."""
    ask(node, verb="prolog", job=12, uid=0, gpus=[0])
    caller = Caller(0 if name == "root" else 4711, name, local=True)
    names = {family["name"] for family in ask(node, caller, verb="metrics")["metrics"]}
    assert (metrics.JOB_INFO in names) is shown
    assert metrics.JOBS in names
