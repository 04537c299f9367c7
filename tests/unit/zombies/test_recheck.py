"""The evidence is checked again before an action; a job whose state has changed is spared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from agent_stand_ins import NODE
from zombie_samples import NOW, gpu, job, node, orphan, squatter

from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.model.cleanup import Keep
from slurm_affinode.slurm.interface import AlreadyDoneError, SlurmError, UnknownJobError

from .zombie_world import IDLE, MAIL, World, act, due, running


@pytest.mark.parametrize(
    ("change", "result", "message"),
    [
        ({"reading": {**IDLE, "util_pct": 40.0}}, "spared", "util_pct is at 40 %"),
        ({"reading": {**IDLE, "sm_active": 0.4}}, "spared", "sm_active is at 40 %"),
        ({"reading": {"util_pct": 0.0}}, "spared", "too few"),
        ({"reading": {"util_pct": None, "sm_active": None}}, "spared", "too few"),
        ({"reading": None}, "spared", "cannot be read again"),
        ({"jobs": {}}, "gone", "has ended"),
        ({"jobs": {"7": running(state="COMPLETED")}}, "gone", "COMPLETED"),
        ({"jobs": {"7": running(state="COMPLETING")}}, "gone", "COMPLETING"),
        ({"jobs": {"7": running(state="PENDING")}}, "gone", "PENDING"),
        ({"jobs": {"7": running(state="SUSPENDED")}}, "spared", "SUSPENDED"),
        ({"jobs": {"7": running(submit=NOW)}}, "gone", "another attempt"),
        ({"jobs": {"7": running(submit=None)}}, "spared", "the same attempt is not known"),
        ({"jobs": {"7": running(user="bob")}}, "spared", "belongs to bob"),
        ({"jobs": {"7": running(user=None)}}, "spared", "belongs to an unknown user"),
        ({"errors": {"7": AlreadyDoneError("cancel job 7: already completing")}}, "gone", "had ended already"),
        ({"errors": {"7": UnknownJobError("cancel job 7: Invalid job id")}}, "gone", "had ended already"),
        ({"errors": {"7": SlurmError("cancel job 7: slurmctld is busy")}}, "failed", "slurmctld is busy"),
        ({"errors": {"7": RuntimeError("boom")}}, "failed", "boom"),
    ],
)
def test_changed_state_prevents_the_action(world: World, change: dict[str, Any], result: str, message: str) -> None:
    """The job computes, has ended or was requeued, has another owner, or Slurm refuses. Each case is recorded."""
    for name, value in change.items():
        setattr(world, name, value)
    [outcome] = act(world)
    assert outcome.result == result
    assert message in outcome.text
    assert world.cancelled == []
    assert world.mails == []
    [record] = world.log.history()
    assert (record.result, message in record.reason) == (result, True)


def test_job_that_computes_between_samples_is_spared(world: World) -> None:
    """The counters of the driver cover only the last moment."""
    readings = iter([0.0, 0.0, 90.0])
    plain = world.ask

    def ask(name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        world.reading = {**IDLE, "util_pct": next(readings)}
        return plain(name, request)

    world.ask = ask  # type: ignore[method-assign]
    assert act(world)[0].result == "spared"


def test_keep_request_before_the_action_is_granted(world: World) -> None:
    """It was made after the decision."""
    submit = squatter().job.submit  # type: ignore[union-attr]
    assert submit is not None
    world.log.keep(Keep("alpha", 7, submit, "alice", "debugging it", NOW, NOW + timedelta(hours=1)))
    [outcome] = act(world)
    assert outcome.result == "spared"
    assert "debugging it" in outcome.text


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([{"job": 7, "source": "cgroup", "sm_pct": 0.0, "memory_pct": 1.0}], "still"),
        ([{"job": 7, "source": "cgroup", "sm_pct": 60.0, "memory_pct": 1.0}], "woke"),
        ([{"job": 7, "source": "cgroup", "sm_pct": None, "memory_pct": None}], "unknown"),
        ([{"job": 7, "source": "cgroup"}], "unknown"),
        ([{"job": 7, "source": "environment", "sm_pct": 0.0, "memory_pct": 0.0}], "unknown"),
        ([], "unknown"),
    ],
)
def test_job_on_shared_gpu_is_rechecked_by_its_processes(
    world: World, rows: list[dict[str, Any]], verdict: str
) -> None:
    """Activity of other jobs is ignored; if activity cannot be attributed, the job is spared."""
    world.reading = {**IDLE, "util_pct": 99.0}
    world.processes = [*rows, {"job": 8, "source": "cgroup", "sm_pct": 99.0, "memory_pct": 9.0}]  # type: ignore[list-item]
    part = replace(squatter(), gpus=tuple(replace(gpu, shared=True) for gpu in squatter().gpus))
    [outcome] = act(world, due(part))
    assert outcome.observation is not None
    assert (outcome.observation.verdict, outcome.result) == (verdict, "done" if verdict == "still" else "spared")


@pytest.mark.parametrize(("batch", "result"), [(None, "spared"), (True, "done")])
def test_interactive_job_unknown_to_accounting_gets_its_allowance(
    world: World, batch: bool | None, result: str
) -> None:
    """Slurm reports it as interactive at the second check."""
    world.policy = parse_policy(f'{MAIL}[default]\ninteractive = {{ max_run = "2d" }}', where="z")
    world.jobs["7"] = running(batch=False)
    [outcome] = act(world, due(squatter(subject=job(batch=batch))))
    assert outcome.result == result
    assert ("it is interactive" in outcome.text) is (result == "spared")


def test_nodes_are_drained_and_resumed_after_recheck(world: World) -> None:
    """Unless the node is drained already, drained for another reason, or has processes left."""
    memory = node("orphan-memory", gpus=(gpu(held_gib=70.0),))
    assert act(world, due(memory, "drain"))[0].result == "done"
    assert world.drained[-1][0] == "n1"
    assert world.drained[-1][1].startswith("slurm-affinode: ")
    assert act(world, due(memory, "drain"), run="r2")[0].result == "gone"
    world.now += timedelta(hours=2)
    world.nodes_ = (replace(NODE, name="n1", flags=frozenset({"DRAIN"}), reason="Kill task failed"),)
    assert "drained already" in act(world, due(memory, "drain"))[0].text
    world.processes = [{"pid": 5, "start_ticks": 1, "system": False}]
    assert act(world, due(node(), "resume"))[0].result == "spared"
    world.processes = [{"pid": 5, "start_ticks": 1, "system": True}]
    assert act(world, due(node(), "resume"))[0].result == "done"
    world.nodes_ = (replace(world.nodes_[0], reason="disk"),)
    world.now += timedelta(hours=2)
    assert "another reason" in act(world, due(node(), "resume"), run="r5")[0].text


@pytest.mark.parametrize(
    ("reason", "user", "uses", "result"),
    [
        ("Kill task failed", "root", [], "done"),
        ("Kill task failed", "slurm", [{"job": 7}], "done"),
        ("Kill task failed", None, [], "done"),
        ("Kill task failed", "operator", [], "spared"),
        ("Kill task failed again, waiting for the vendor", "root", [], "spared"),
        ("Kill task failed", "root", [{"job": 6}], "spared"),
        ("disk is full", "root", [], "gone"),
    ],
)
def test_only_clean_nodes_drained_by_slurm_are_resumed(
    world: World, reason: str, user: str | None, uses: list[dict[str, Any]], result: str
) -> None:
    """Not those drained by an administrator, nor those with processes of an ended job outside GPUs."""
    world.nodes_ = (replace(NODE, name="n1", flags=frozenset({"DRAIN"}), reason=reason, reason_user=user),)
    world.uses = uses
    assert [outcome.result for outcome in act(world, due(node(), "resume"))] == [result]
    assert world.drained == ([("n1", "")] if result == "done" else [])


def test_node_is_not_resumed_without_knowledge_of_all_its_processes(world: World) -> None:
    """An agent may not report the processes of jobs, or not see a GPU."""
    world.nodes_ = (replace(NODE, name="n1", flags=frozenset({"DRAIN"}), reason="Kill task failed"),)
    whole = world.ask("n1", {"verb": "processes"})
    for answer, text in (
        ({**whole, "jobs": None}, "does not report the processes"),
        ({name: value for name, value in whole.items() if name != "jobs"}, "does not report the processes"),
        ({**whole, "gpus": whole["gpus"][:1]}, "n1 shows 1 of its 2 GPUs"),
        ({**whole, "gpus": []}, "n1 shows 0 of its 2 GPUs"),
    ):
        world.answers = {"processes": answer}
        [outcome] = act(world, due(node(), "resume"))
        assert outcome.result == "spared"
        assert text in outcome.text
    assert world.drained == []


def test_gpus_with_the_same_name_are_not_distinguished(world: World) -> None:
    """Which of them the finding is about is unknown."""
    whole = world.ask("n1", {"verb": "processes"})
    world.answers = {"processes": {**whole, "gpus": [whole["gpus"][0], whole["gpus"][0]]}}
    [outcome] = act(world)
    assert outcome.result == "spared"
    assert world.cancelled == []


@pytest.mark.parametrize(
    ("verb", "before", "after"),
    [
        ("resume", {"flags": frozenset({"DRAIN"}), "reason": "Kill task failed"}, {"reason": "swap the GPU"}),
        ("drain", {}, {"flags": frozenset({"DRAIN"}), "reason": "swap the GPU"}),
    ],
)
def test_change_by_operator_during_recheck_is_kept(
    world: World, verb: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """An agent takes seconds to respond, so the state of the node is read again after it."""
    world.nodes_ = (replace(NODE, name="n1", **before),)
    plain = world.ask

    def ask(name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        world.nodes_ = (replace(world.nodes_[0], **after),)
        return plain(name, request)

    world.ask = ask  # type: ignore[method-assign]
    finding = node() if verb == "resume" else node("orphan-memory", gpus=(gpu(held_gib=70.0),))
    assert [outcome.result for outcome in act(world, due(finding, verb))] == ["gone"]
    assert world.drained == []


def test_process_of_known_job_does_not_drain_the_node(world: World) -> None:
    """The job started after the first query to Slurm, or was requeued."""
    row = {"pid": 4242, "start_ticks": 99887, "uid": 2001, "user": "alice", "job": 9, "source": "cgroup"}
    world.processes = [row]
    world.jobs["9"] = running("9")
    assert [outcome.result for outcome in act(world, due(orphan(), "drain"))] == ["gone"]
    del world.jobs["9"]
    assert [outcome.result for outcome in act(world, due(orphan(), "drain"), run="r2")] == ["done"]


def test_node_with_completing_job_is_not_resumed(world: World) -> None:
    """Processes that could not be killed are still there."""
    world.nodes_ = (replace(NODE, name="n1", flags=frozenset({"DRAIN"}), reason="Kill task failed"),)
    world.jobs["7"], world.uses = running(state="COMPLETING"), [{"job": 7, "cpu_s": 1.0, "memory_mib": 1.0}]
    assert [outcome.result for outcome in act(world, due(node(), "resume"))] == ["spared"]
