"""The evidence is read again before anything is done: what has changed meanwhile spares the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from agent_stand_ins import NODE
from zombie_samples import NOW, gpu, job, node, orphan, squatter
from zombie_world import IDLE, MAIL, World, act, due, running

from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.model.cleanup import Keep
from slurm_affinode.slurm.faults import AlreadyDoneError, SlurmError, UnknownJobError


@pytest.mark.parametrize(
    ("change", "result", "says"),
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
        ({"jobs": {"7": running(submit=NOW)}}, "gone", "another run"),
        ({"jobs": {"7": running(user="bob")}}, "spared", "is of bob"),
        ({"errors": {"7": AlreadyDoneError("cancel job 7: already completing")}}, "gone", "had ended already"),
        ({"errors": {"7": UnknownJobError("cancel job 7: Invalid job id")}}, "gone", "had ended already"),
        ({"errors": {"7": SlurmError("cancel job 7: slurmctld is busy")}}, "failed", "slurmctld is busy"),
        ({"errors": {"7": RuntimeError("boom")}}, "failed", "boom"),
    ],
)
def test_what_has_changed_since_the_evidence(world: World, change: dict[str, Any], result: str, says: str) -> None:
    """Woke up, ended, requeued, another's; another administrator was quicker; Slurm refuses. Each is written down."""
    for name, value in change.items():
        setattr(world, name, value)
    [outcome] = act(world)
    assert outcome.result == result
    assert says in outcome.text
    assert world.cancelled == []
    assert world.mails == []
    [record] = world.log.history()
    assert (record.result, says in record.reason) == (result, True)


def test_one_that_wakes_up_between_two_looks_is_spared(world: World) -> None:
    """The driver's counters are about the last moment alone."""
    looks = iter([0.0, 0.0, 90.0])
    plain = world.ask

    def ask(name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        world.reading = {**IDLE, "util_pct": next(looks)}
        return plain(name, request)

    world.ask = ask  # type: ignore[method-assign]
    assert act(world)[0].result == "spared"


def test_a_wish_that_came_meanwhile_is_granted(world: World) -> None:
    """Between decision and action."""
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
def test_a_part_of_a_gpu_is_looked_at_again_by_its_own_processes(
    world: World, rows: list[dict[str, Any]], verdict: str
) -> None:
    """What somebody else computes there is not its doing; what cannot be told apart speaks for it."""
    world.reading = {**IDLE, "util_pct": 99.0}
    world.processes = [*rows, {"job": 8, "source": "cgroup", "sm_pct": 99.0, "memory_pct": 9.0}]  # type: ignore[list-item]
    part = replace(squatter(), gpus=tuple(replace(gpu, shared=True) for gpu in squatter().gpus))
    [outcome] = act(world, due(part))
    assert outcome.look is not None
    assert (outcome.look.verdict, outcome.result) == (verdict, "done" if verdict == "still" else "spared")


@pytest.mark.parametrize(("said", "result"), [(None, "spared"), (True, "done")])
def test_an_interactive_job_that_accounting_did_not_know_as_one_has_its_allowance(
    world: World, said: bool | None, result: str
) -> None:
    """Slurm says so when the job is looked at again."""
    world.policy = parse_policy(f'{MAIL}[default]\ninteractive = {{ max_run = "2d" }}', where="z")
    world.jobs["7"] = running(batch=False)
    [outcome] = act(world, due(squatter(subject=job(batch=said))))
    assert outcome.result == result
    assert ("it is interactive" in outcome.text) is (result == "spared")


def test_nodes_are_drained_and_resumed_after_another_look(world: World) -> None:
    """Not what is drained already, for another reason, or still dirty."""
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
def test_only_what_slurm_drained_itself_is_resumed_and_when_it_is_clean(
    world: World, reason: str, user: str | None, uses: list[dict[str, Any]], result: str
) -> None:
    """Not what a person keeps back, nor where an ended job's processes hang somewhere else than on a GPU."""
    world.nodes_ = (replace(NODE, name="n1", flags=frozenset({"DRAIN"}), reason=reason, reason_user=user),)
    world.uses = uses
    assert [one.result for one in act(world, due(node(), "resume"))] == [result]
    assert world.drained == ([("n1", "")] if result == "done" else [])


@pytest.mark.parametrize(
    ("verb", "before", "after"),
    [
        ("resume", {"flags": frozenset({"DRAIN"}), "reason": "Kill task failed"}, {"reason": "swap the GPU"}),
        ("drain", {}, {"flags": frozenset({"DRAIN"}), "reason": "swap the GPU"}),
    ],
)
def test_what_an_operator_does_while_the_agent_is_asked_stays(
    world: World, verb: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """An agent takes seconds to answer: Slurm's word of the node is read again behind it."""
    world.nodes_ = (replace(NODE, name="n1", **before),)
    plain = world.ask

    def ask(name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        world.nodes_ = (replace(world.nodes_[0], **after),)
        return plain(name, request)

    world.ask = ask  # type: ignore[method-assign]
    finding = node() if verb == "resume" else node("orphan-memory", gpus=(gpu(held_gib=70.0),))
    assert [one.result for one in act(world, due(finding, verb))] == ["gone"]
    assert world.drained == []


def test_no_node_is_drained_for_a_process_whose_job_is_there_by_now(world: World) -> None:
    """It was started behind Slurm's answer, or Slurm runs it again."""
    row = {"pid": 4242, "start_ticks": 99887, "uid": 2001, "user": "alice", "job": 9, "source": "cgroup"}
    world.processes = [row]
    world.jobs["9"] = running("9")
    assert [one.result for one in act(world, due(orphan(), "drain"))] == ["gone"]
    del world.jobs["9"]
    assert [one.result for one in act(world, due(orphan(), "drain"), run="r2")] == ["done"]


def test_a_node_on_which_a_job_still_completes_is_not_resumed(world: World) -> None:
    """What the kill did not end hangs on."""
    world.nodes_ = (replace(NODE, name="n1", flags=frozenset({"DRAIN"}), reason="Kill task failed"),)
    world.jobs["7"], world.uses = running(state="COMPLETING"), [{"job": 7, "cpu_s": 1.0, "memory_mib": 1.0}]
    assert [one.result for one in act(world, due(node(), "resume"))] == ["spared"]
