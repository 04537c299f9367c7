"""Executing actions: no duplicates, failures are independent, everything is recorded."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from agent_stand_ins import NODE
from cleanup_samples import RULE, TWICE, warned
from zombie_samples import HOSTILE, NOW, gpu, job, lost, orphan, squatter

from slurm_affinode.agent.client import AnswerError
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.core.cleanup_plan import plan
from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.db.audit import Who
from slurm_affinode.model.cleanup import Keep, Ledger, Settings
from slurm_affinode.model.cluster import GpuCount, Step
from slurm_affinode.slurm.interface import AlreadyDoneError, SlurmError, UnknownJobError
from slurm_affinode.zombies.act import OptedIn, execute, opted_in, parts
from slurm_affinode.zombies.audit import command_entry
from slurm_affinode.zombies.mail import notify

from .zombie_world import IDLE, MAIL, World, act, due, running


def test_idle_job_is_canceled_mailed_and_recorded(world: World) -> None:
    """It is sampled three times before; the record has the original and the new evidence."""
    [outcome] = act(world)
    assert (outcome.result, world.cancelled) == ("done", ["7"])
    assert len([item for item in world.requests if item[1]["verb"] == "processes"]) == 3
    assert [mail.subject for mail in world.mails] == ["[alpha] Job 7 was canceled"]
    record, notice = world.log.history()
    assert (record.verb, record.result, record.user, record.job) == ("cancel", "done", "alice", "7")
    assert record.evidence["finding"]["key"] == squatter().key
    assert record.evidence["read_again"]["seen"][0]["reading"]["util_pct"] == 0.0
    assert (notice.verb, notice.result) == ("tell", "done")


def test_failed_action_is_retried_by_the_next_run(world: World) -> None:
    """It does not stop the other actions, and those are not repeated."""
    second = squatter(subject=job(job_id=8, id="8"))
    world.jobs["8"] = running("8")
    world.errors["7"] = SlurmError("cancel job 7: slurmctld is busy")
    results = act(world, due(), due(second))
    assert [result.result for result in results] == ["failed", "done"]
    world.errors.clear()
    assert [outcome.result for outcome in act(world, due(), due(second), run="r2")] == ["done", "gone"]
    assert world.cancelled == ["8", "7"]


def test_concurrent_runs_cancel_once(world: World) -> None:
    results: list[str] = []

    def act_once(run: str, kind: str) -> None:
        results.extend(each.result for each in act(world, due(squatter(kind=kind)), run=run))

    threads = [threading.Thread(target=act_once, args=(f"r{n}", "squatter")) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["done", "gone", "gone", "gone"]
    assert world.cancelled == ["7"]


def test_last_array_task_is_canceled_alone(world: World) -> None:
    """Its raw ID is the ID of the whole array."""
    world.jobs["7_3"] = running("7_3", array_job_id=7, array_task_id=3)
    [outcome] = act(world, due(squatter(subject=job(id="7_3"))))
    assert outcome.result == "done"
    assert world.cancelled == ["7_3"]


def test_cancel_steps_keeps_the_allocation(world: World) -> None:
    """A job without steps is canceled."""
    step = Step(7, "0", "train", "RUNNING", ("n1",), NOW, 1, None)
    world.jobs["7"] = running(steps=(step, replace(step, step="batch"), replace(step, step="1")))
    act(world, due(cancel_steps=True))
    assert world.cancelled == ["7.0", "7.1"]
    assert world.mails[-1].subject == "[alpha] Steps of job 7 were ended"
    world.jobs["8"] = running("8", steps=(replace(step, step="batch"),))
    act(world, due(squatter(subject=job(job_id=8, id="8")), cancel_steps=True))
    assert world.cancelled[-1] == "8"
    assert world.mails[-1].subject == "[alpha] Job 8 was canceled"


def test_every_component_of_het_job_is_checked_before_canceling(world: World) -> None:
    """Canceling the first component cancels the whole job."""
    names = ("7+0", "7+1")
    world.jobs |= {
        name: replace(running("7"), job_id=7 + n, het_job_id=7, het_offset=n, nodes=(f"n{n + 1}",))
        for n, name in enumerate(names)
    }
    result = [
        squatter(subject=job(job_id=7 + n, id=name), gpus=(gpu(node=f"n{n + 1}"),)) for n, name in enumerate(names)
    ]
    ask, busy = world.ask, {"util_pct": 90.0, "sm_active": 0.9, "fb_used_mib": 78000.0}

    def answer(name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        world.reading = busy if name == "n2" else dict(IDLE)
        return ask(name, request)

    world.ask = answer  # type: ignore[method-assign]
    [outcome] = act(world, replace(due(result[0]), parts=(result[1],)))
    assert (outcome.result, "computes" in outcome.text, world.cancelled) == ("spared", True, [])
    busy |= IDLE
    assert [item.result for item in act(world, replace(due(result[0]), parts=(result[1],)))] == ["done"]
    assert world.cancelled == ["7+0"]


def test_het_components_without_gpus_are_ignored() -> None:
    gpus = GpuCount(1)
    jobs = [replace(running(), job_id=7 + n, het_job_id=7, het_offset=n, gpus_allocated=gpus if n else None)
            for n in range(3)]  # fmt: skip
    assert parts([*jobs, running("20")]) == dict.fromkeys((7, 8, 9), frozenset({8, 9}))


def test_spared_job_does_not_count_toward_the_limit(world: World) -> None:
    """Otherwise the worst job, on a node that does not respond, would block all others. The limit still applies."""
    worst = squatter(nodes=("n9",), gpus=(gpu(node="n9"),), held_gpu_hours=99.0)
    others = [squatter(subject=job(job_id=n, id=str(n)), held_gpu_hours=9.0 - n / 9) for n in (8, 9)]
    world.jobs |= {name: running(name) for name in ("7", "8", "9")}
    text = MAIL + RULE + "[limits]\ncancel = 1\n"
    world.policy = parse_policy(text, where="z")
    ledger = Ledger({key: value for item in (worst, *others) for key, value in warned(item, *TWICE).warnings.items()})
    planned = plan([worst, *others], world.policy, ledger, NOW)
    assert [(refusal.verb, refusal.code) for refusal in planned] == [
        ("cancel", "due"),
        ("none", "limit"),
        ("none", "limit"),
    ]
    ask = world.ask

    def answer(name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        if name == "n9":
            raise UnreachableError("the agent on n9 does not respond")
        return ask(name, request)

    world.ask = answer  # type: ignore[method-assign]
    assert [(outcome.action.target, outcome.result) for outcome in act(world, *planned)] == [
        ("job 7", "spared"),
        ("job 8", "done"),
    ]
    assert world.cancelled == ["8"]


@pytest.mark.parametrize(
    ("errors", "result", "ended"),
    [
        ({"7.0": AlreadyDoneError("step 7.0 has ended")}, "done", ["7.1"]),
        ({"7.0": SlurmError("slurmctld is busy")}, "failed", ["7.1"]),
        ({"7.0": UnknownJobError("no step"), "7.1": AlreadyDoneError("step 7.1 has ended")}, "gone", []),
    ],
)
def test_steps_are_canceled_independently(
    world: World, errors: dict[str, Exception], result: str, ended: list[str]
) -> None:
    """A step that has ended meanwhile does not prevent canceling the next."""
    step = Step(7, "0", "train", "RUNNING", ("n1",), NOW, 1, None)
    world.jobs["7"] = running(steps=(step, replace(step, step="1")))
    world.errors = errors
    assert [outcome.result for outcome in act(world, due(cancel_steps=True))] == [result]
    assert world.cancelled == ended


def test_interrupted_action_is_recorded(world: World) -> None:
    """Ctrl-C during scancel: it may have taken effect, and the next run may check again."""
    world.errors["7"] = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        act(world)
    [record] = world.log.history()
    assert (record.verb, record.result, "interrupted" in record.reason) == ("cancel", "failed", True)
    world.errors.clear()
    assert [outcome.result for outcome in act(world, run="r2")] == ["done"]


def test_template_error_does_not_affect_the_action(world: World, tmp_path: Path) -> None:
    (tmp_path / "digest.txt.j2").write_text("{{ items[0].todo + 1 }}")
    world.policy = parse_policy(f'{MAIL}templates = "{tmp_path}"\n', where="z")
    assert [outcome.result for outcome in act(world)] == ["done"]
    assert [(outcome.verb, outcome.result) for outcome in world.log.history()] == [
        ("cancel", "done"),
        ("tell", "failed"),
    ]


def test_opted_in_job_is_suspended(world: World) -> None:
    """The agents report which jobs opted in; an agent's refusal is a failure."""
    rows = [(7, "watched"), (9, "suspended"), (10, "asleep"), (11, "waking")]
    world.answers["status"] = {
        "jobs": [{"job_id": number, "state": state, "shares_gpus": True} for number, state in rows]
    }
    assert opted_in([due()], world.ask) == OptedIn(frozenset({7}), frozenset({10, 11}))
    assert [outcome.result for outcome in act(world, due(verb="suspend"))] == ["done"]
    assert world.cancelled == ["suspend 7"]
    assert "Suspended" in world.mails[0].text
    world.errors["suspend"] = AnswerError("steps", "job 7 has steps", hint=None, exit_code=1)
    assert [outcome.result for outcome in act(world, due(squatter(subject=job(submit=NOW)), verb="suspend"))] == [
        "gone"
    ]
    world.answers["status"] = UnreachableError("no agent")
    assert opted_in([due()], world.ask) == OptedIn(unknown=frozenset({"n1"}))


@pytest.mark.parametrize("shares", [False, None])
@pytest.mark.parametrize("state", ["watched", "asleep", "waking"])
def test_sleep_on_a_whole_gpu_does_not_protect_a_job(world: World, state: str, shares: bool | None) -> None:
    """Its GPU stays allocated to it: a suspension in place would free nothing. Unknown counts as a whole GPU."""
    row = {"job_id": 7, "state": state, "option": {"mode": "inplace"}, "shares_gpus": shares}
    world.answers["status"] = {"jobs": [row]}
    assert opted_in([due()], world.ask) == OptedIn()
    assert [outcome.result for outcome in act(world)] == ["done"]
    assert world.cancelled == ["7"]


@pytest.mark.parametrize(
    ("code", "limit", "result", "verb"),
    [("host-memory", 5, "done", "cancel"), ("host-memory", 0, "failed", "suspend"),
     ("stopped", 5, "done", "cancel"), ("under-way", 5, "failed", "suspend"),
     ("already-suspended", 5, "gone", "suspend"), ("not-opted-in", 5, "failed", "suspend"),
     ("not-suspended", 5, "failed", "suspend"), ("slurm", 5, "failed", "suspend"),
     ("no-answer", 5, "failed", "suspend"), ("too-often", 5, "failed", "suspend"),
     ("recovering", 5, "failed", "suspend"), ("not-started", 5, "failed", "suspend")],
)  # fmt: skip
def test_job_that_cannot_be_suspended_is_canceled(world: World, code: str, limit: int, result: str, verb: str) -> None:
    """Within the limit on cancellations; a suspension in progress is left alone.

    A job stopped by its owner is not protected; a restarting agent is not a reason to cancel.
    """
    world.policy = parse_policy(MAIL + f"[limits]\ncancel = {limit}", where="z")
    world.errors["suspend"] = AnswerError(code, "does not fit into memory", hint=None, exit_code=1)
    [outcome] = act(world, due(verb="suspend"))
    assert (outcome.result, outcome.action.verb) == (result, verb)
    assert world.cancelled == (["7"] if verb == "cancel" else [])
    assert world.log.history()[0].verb == verb


@pytest.mark.parametrize(
    ("code", "result"),
    [("", "done"), ("gone", "gone"), ("not-on-gpu", "gone"), ("has-job", "spared"), ("maybe-job", "spared"),
     ("unknown", "spared"), ("system", "spared"), ("still-there", "failed"), ("no-driver", "failed")],
)  # fmt: skip
def test_agent_decides_whether_to_kill_a_process(world: World, code: str, result: str) -> None:
    """It identifies the process by PID and start time and checks it again."""
    answer = {"ended_by": "SIGTERM"} if not code else AnswerError(code, code, hint=None, exit_code=1)
    world.answers["kill-orphan"] = answer
    [outcome] = act(world, due(orphan(), "kill-process"))
    assert outcome.result == result
    assert world.requests == [("n1", {"verb": "kill-orphan", "pid": 4242, "start_ticks": 99887})]
    assert world.log.history()[0].node == "n1"


@pytest.mark.parametrize(
    ("code", "result"),
    [("", "done"), ("served", "spared"), ("other-job", "spared"), ("no-memory", "spared"), ("ended", "gone")],
)
def test_agent_decides_whether_to_end_an_engine_without_its_server(world: World, code: str, result: str) -> None:
    """The request names the job. The owner is notified of the end, and the audit is about the job."""
    answer: Any = AnswerError(code, "no", hint=None, exit_code=1) if code else {"ended_by": "SIGTERM"}
    world.answers["kill-orphan"] = answer
    [outcome] = act(world, due(lost(), "kill-process"))
    assert outcome.result == result
    assert world.requests == [("n1", {"verb": "kill-orphan", "pid": 4242, "start_ticks": 99887, "job": 7})]
    assert [mail.recipient for mail in world.mails] == (["alice@example.org"] if result == "done" else [])
    assert all("The process was ended" in mail.text for mail in world.mails)
    entries = [action for action in world.log.history(job="7") if action.verb == "kill-process"]
    assert [(entry.job_id, entry.user, entry.result) for entry in entries] == [(7, "alice", result)]


@pytest.mark.parametrize(("error", "result"), [(None, "done"), ("memory", "failed"), ("ended", "gone")])
def test_idle_server_is_suspended_and_never_canceled_instead(world: World, error: str | None, result: str) -> None:
    """Its owner is notified; its GPUs are checked first."""
    finding = squatter(kind="model-server", variant="idle")
    action = replace(due(finding, "suspend"), settings=Settings(action="suspend"))
    if error is not None:
        world.errors["suspend"] = AnswerError(error, "no", hint=None, exit_code=1)
    [outcome] = act(world, action)
    assert (outcome.result, outcome.action.verb) == (result, "suspend")
    assert world.cancelled == (["suspend 7"] if error is None else [])
    assert len(world.mails) == (error is None)


def test_server_that_computes_again_is_not_suspended(world: World) -> None:
    world.reading = {**IDLE, "util_pct": 90.0}
    action = replace(due(squatter(kind="model-server", variant="idle"), "suspend"), settings=Settings(action="suspend"))
    [outcome] = act(world, action)
    assert (outcome.result, world.cancelled) == ("spared", [])


def test_owner_may_keep_an_engine_at_the_last_moment(world: World) -> None:
    keep = Keep("alpha", 7, NOW - timedelta(hours=9), "alice", "debugging it", NOW, NOW + timedelta(hours=1))
    world.log.keep(keep)
    [outcome] = act(world, due(lost(), "kill-process"))
    assert (outcome.result, world.requests) == ("spared", [])


def test_listing_is_recorded_with_decisions(world: World) -> None:
    """Also if no action was taken."""
    actions = plan([squatter(subject=job(name=HOSTILE))], world.policy, world.log.ledger(NOW), NOW)
    world.log.record([command_entry(actions, Who("r", "root@x"), NOW, "clean")])
    [record] = world.log.history()
    assert (record.verb, record.result) == ("look", "seen")
    assert record.evidence[0]["code"] == actions[0].code


def test_job_is_warned_twice_then_canceled(world: World) -> None:
    """All stages of a site policy, one run after the other."""
    rule = '[[rule]]\nkinds = ["squatter"]\naction = "cancel"\n'
    rule += 'fixed = { first_warning = "1h", second_warning = "90m", cancel = "2h" }\n'
    rule += 'sliding = { first_warning = "1h", second_warning = "90m", cancel = "2h" }\n'
    world.policy = parse_policy(rule + MAIL, where="z")
    began = NOW
    seen: list[str] = []
    for minutes in range(0, 240, 15):
        world.now = began + timedelta(minutes=minutes)
        finding = squatter(
            since=began,
            observed_at=world.now,
            subject=job(start=began - timedelta(hours=4), submit=NOW - timedelta(hours=9)),
        )
        ledger = world.log.ledger(world.now)
        actions = plan([finding], world.policy, ledger, world.now)
        done = [*execute(actions, world.tools(f"r{minutes}")), *notify(actions, world.tools(f"r{minutes}"), ledger)]
        seen += [f"{minutes}: {outcome.action.verb}{outcome.action.number or ''} {outcome.result}" for outcome in done]
        if world.cancelled:
            break
    assert seen == ["60: warn-user1 done", "90: warn-user2 done", "120: cancel done"]


def test_nodes_of_stuck_job_are_drained_one_by_one(world: World) -> None:
    """Each run drains the first node that is not drained yet."""
    finding = squatter(kind="completing", nodes=("n1", "n2"), gpus=(), subject=job(state="COMPLETING"))
    world.jobs["7"] = running(state="COMPLETING")
    free = replace(NODE, name="n2")
    world.nodes_ = (replace(NODE, name="n1", flags=frozenset({"DRAIN"})), free)
    assert [outcome.result for outcome in act(world, due(finding, "drain"))] == ["done"]
    world.nodes_ = (world.nodes_[0], replace(free, flags=frozenset({"DRAIN"})))
    assert [outcome.result for outcome in act(world, due(finding, "drain"), run="r2")] == ["gone"]
    assert [name for name, _ in world.drained] == ["n2"]


def test_job_that_may_sleep_is_not_canceled(world: World) -> None:
    """The agent responded about the GPUs, and not about the states of jobs."""
    world.answers["status"] = UnreachableError("the agent on n1 does not respond")
    [outcome] = act(world)
    assert outcome.result == "spared"
    assert "whether it sleeps in place is not known: the agent on n1 does not respond" in outcome.text
    assert world.cancelled == []


@pytest.mark.parametrize(
    ("state", "result", "done"),
    [("watched", "done", ["suspend 7"]), ("asleep", "spared", []), ("restored", "done", ["7"])],
)
def test_opt_in_is_checked_again_before_canceling(world: World, state: str, result: str, done: list[str]) -> None:
    """The agent may have been restarting when the decision was made; it does not matter if the policy prefers to
    cancel.
    """
    world.answers["status"] = {"jobs": [{"job_id": 7, "state": state, "shares_gpus": True}]}
    assert [outcome.result for outcome in act(world)] == [result]
    assert world.cancelled == done
    again = due(squatter(subject=job(job_id=8, id="8")), prefer_suspend=False)
    world.jobs["8"] = running("8")
    world.answers["status"] = UnreachableError("the agent on n1 does not respond")
    assert [outcome.result for outcome in act(world, again)] == ["done"]
    assert world.cancelled[-1] == "8"
