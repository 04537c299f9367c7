"""Acting on findings: evidence read again, nothing twice, a failure does not stop the rest, all is written down."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from agent_stand_ins import NODE
from agent_stand_ins import job as slurm_job
from zombie_samples import HOSTILE, NOW, gpu, job, node, orphan, squatter

from slurm_affinode.agent.client import AnswerError
from slurm_affinode.core.cleanup_plan import plan
from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.errors import UnreachableError
from slurm_affinode.model.cleanup import Action, Keep, Policy, Settings, Stages
from slurm_affinode.model.cluster import Job, Node, Step
from slurm_affinode.model.finding import Finding
from slurm_affinode.report.mail import Digest
from slurm_affinode.slurm.faults import AlreadyDoneError, SlurmError, UnknownJobError
from slurm_affinode.store.repository import Repository
from slurm_affinode.store.zombies import ZombieLog
from slurm_affinode.workflow.zombie_actions import OptedIn, execute, looked, opted_in
from slurm_affinode.workflow.zombie_recheck import Recheck
from slurm_affinode.workflow.zombie_tell import tell
from slurm_affinode.workflow.zombie_tools import Outcome, Tools, Who

STAGES = Stages(3600.0, 5400.0, 7200.0)
SETTINGS = Settings(action="cancel", fixed=STAGES, sliding=STAGES)
IDLE = {"util_pct": 0.0, "sm_active": 0.0, "fb_used_mib": 78000.0}


@dataclass
class World:
    """A slurmctld, agents and a mail server made of values."""

    store: Repository
    jobs: dict[str, Job] = field(default_factory=dict)
    nodes_: tuple[Node, ...] = (replace(NODE, name="n1"),)
    cancelled: list[str] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    reading: dict[str, Any] | None = field(default_factory=lambda: dict(IDLE))
    processes: list[dict[str, Any]] = field(default_factory=list)
    uses: list[dict[str, Any]] = field(default_factory=list)
    asked: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)
    mails: list[Digest] = field(default_factory=list)
    refuse: set[str] = field(default_factory=set)
    drained: list[tuple[str, str]] = field(default_factory=list)
    policy: Policy = field(default_factory=lambda: parse_policy(MAIL, where="z"))
    now: datetime = NOW

    # SlurmClient

    def job(self, name: str) -> Job:
        if name not in self.jobs:
            raise UnknownJobError(f"show job {name}: Invalid job id specified")
        return self.jobs[name]

    def nodes(self) -> tuple[Node, ...]:
        return self.nodes_

    def overview(self) -> tuple[Job, ...]:
        return tuple(self.jobs.values())

    def config(self) -> dict[str, str]:
        return {"SlurmUser": "slurm(64030)"}

    def cancel(self, name: str) -> None:
        if name in self.errors:
            raise self.errors[name]
        self.cancelled.append(name)

    def drain(self, name: str, reason: str) -> None:
        self.drained.append((name, reason))

    def resume(self, name: str) -> None:
        self.drained.append((name, ""))

    # agents

    def ask(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append((name, request))
        found = self.answers.get(request["verb"])
        if isinstance(found, Exception):
            raise found
        if found is not None:
            return dict(found)
        if self.reading is None:
            raise UnreachableError(f"the agent on {name} does not answer")
        row = {"uuid": "GPU-0", "index": 0, "mig": None, "reading": self.reading, "processes": self.processes,
               "fault": None, "busy_pct": 0.0}  # fmt: skip
        return {"node": name, "gpus": [row, {**row, "uuid": "GPU-1", "index": 1}], "jobs": self.uses}

    def suspend(self, name: str) -> dict[str, Any]:
        if "suspend" in self.errors:
            raise self.errors["suspend"]
        self.cancelled.append(f"suspend {name}")
        return {}

    def post(self, digest: Digest) -> None:
        if digest.recipient in self.refuse:
            raise UnreachableError(f"mail server refuses {digest.recipient}")
        self.mails.append(digest)

    def tools(self, run: str = "r1") -> Tools:
        recheck = Recheck(self, self.ask, sleep=lambda _: None)  # type: ignore[arg-type]
        return Tools(
            self, self.ask, self.suspend, recheck, self.post, ZombieLog(self.store.engine), self.policy,  # type: ignore[arg-type]
            Who(run, "root@login"), lambda: self.now,
        )  # fmt: skip

    @property
    def log(self) -> ZombieLog:
        return ZombieLog(self.store.engine)


MAIL = '[mail]\nvia = "smtp"\naddress = "{user}@example.org"\nadmins = ["ops@example.org"]\n'


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with Repository.open(str(tmp_path / "z.sqlite")) as store:
        made = World(store)
        made.jobs["7"] = running()
        yield made


def running(name: str = "7", **values: Any) -> Job:
    return slurm_job(int(name.partition("_")[0]), **{"submit": NOW - timedelta(hours=9), "nodes": ("n1",), **values})


def due(finding: Finding | None = None, verb: str = "cancel", **settings: Any) -> Action:
    return Action(verb, finding or squatter(), "due", "idle", "rule", settings=replace(SETTINGS, **settings))  # type: ignore[arg-type]


def act(world: World, *actions: Action, run: str = "r1") -> list[Outcome]:
    return execute(actions or (due(),), world.tools(run))


def test_a_squatter_that_still_is_one_is_cancelled_told_and_written_down(world: World) -> None:
    """After three looks; with the evidence of then and now."""
    [outcome] = act(world)
    assert (outcome.result, world.cancelled) == ("done", ["7"])
    assert len([one for one in world.asked if one[1]["verb"] == "processes"]) == 3
    assert [mail.subject for mail in world.mails] == ["[alpha] Job 7 was cancelled"]
    record, told = world.log.history()
    assert (record.verb, record.result, record.user, record.job) == ("cancel", "done", "alice", "7")
    assert record.evidence["finding"]["key"] == squatter().key
    assert record.evidence["read_again"]["seen"][0]["reading"]["util_pct"] == 0.0
    assert (told.verb, told.result) == ("tell", "done")


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


def test_one_failure_does_not_stop_the_rest_and_may_be_tried_again(world: World) -> None:
    """What failed is free for the next run; what was done is not."""
    second = squatter(subject=job(job_id=8, id="8"))
    world.jobs["8"] = running("8")
    world.errors["7"] = SlurmError("cancel job 7: slurmctld is busy")
    results = act(world, due(), due(second))
    assert [one.result for one in results] == ["failed", "done"]
    world.errors.clear()
    assert [one.result for one in act(world, due(), due(second), run="r2")] == ["done", "gone"]
    assert world.cancelled == ["8", "7"]


def test_two_runs_at_once_cancel_once(world: World) -> None:
    """Whatever kind they found it as."""
    results: list[str] = []

    def one(run: str, kind: str) -> None:
        results.extend(each.result for each in act(world, due(squatter(kind=kind)), run=run))

    threads = [threading.Thread(target=one, args=(f"r{n}", "squatter")) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["done", "gone", "gone", "gone"]
    assert world.cancelled == ["7"]


def test_the_last_task_of_an_array_is_cancelled_alone(world: World) -> None:
    """Its raw id is the id of the whole array."""
    world.jobs["7_3"] = running("7_3", array_job_id=7, array_task_id=3)
    [outcome] = act(world, due(squatter(subject=job(id="7_3"))))
    assert outcome.result == "done"
    assert world.cancelled == ["7_3"]


def test_steps_are_ended_and_the_allocation_stays_where_the_rule_says_so(world: World) -> None:
    """Without steps the job is cancelled."""
    step = Step(7, "0", "train", "RUNNING", ("n1",), NOW, 1, None)
    world.jobs["7"] = running(steps=(step, replace(step, step="batch"), replace(step, step="1")))
    act(world, due(cancel_steps=True))
    assert world.cancelled == ["7.0", "7.1"]
    world.jobs["8"] = running("8", steps=(replace(step, step="batch"),))
    act(world, due(squatter(subject=job(job_id=8, id="8")), cancel_steps=True))
    assert world.cancelled[-1] == "8"


@pytest.mark.parametrize(
    ("errors", "result", "ended"),
    [
        ({"7.0": AlreadyDoneError("step 7.0 has ended")}, "done", ["7.1"]),
        ({"7.0": SlurmError("slurmctld is busy")}, "failed", ["7.1"]),
        ({"7.0": UnknownJobError("no step"), "7.1": AlreadyDoneError("step 7.1 has ended")}, "gone", []),
    ],
)
def test_each_step_is_ended_whatever_becomes_of_the_others(
    world: World, errors: dict[str, Exception], result: str, ended: list[str]
) -> None:
    """One that has ended meanwhile does not shelter the next."""
    step = Step(7, "0", "train", "RUNNING", ("n1",), NOW, 1, None)
    world.jobs["7"] = running(steps=(step, replace(step, step="1")))
    world.errors = errors
    assert [one.result for one in act(world, due(cancel_steps=True))] == [result]
    assert world.cancelled == ended


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


def test_an_action_that_is_broken_off_is_written_down(world: World) -> None:
    """Somebody presses Ctrl-C while scancel runs: it may have been heard, and the next run may look."""
    world.errors["7"] = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        act(world)
    [record] = world.log.history()
    assert (record.verb, record.result, "broken off" in record.reason) == ("cancel", "failed", True)
    world.errors.clear()
    assert [one.result for one in act(world, run="r2")] == ["done"]


def test_a_mail_that_cannot_be_made_does_not_undo_what_was_done(world: World, tmp_path: Path) -> None:
    """A template of the site that is wrong in a way of its own."""
    (tmp_path / "digest.txt.j2").write_text("{{ items[0].todo + 1 }}")
    world.policy = parse_policy(f'{MAIL}templates = "{tmp_path}"\n', where="z")
    assert [one.result for one in act(world)] == ["done"]
    assert [(one.verb, one.result) for one in world.log.history()] == [("cancel", "done"), ("tell", "failed")]


def test_a_job_that_opted_in_is_suspended(world: World) -> None:
    """The agents say who has; what an agent refuses is a failure."""
    rows = [(7, "watched"), (9, "suspended"), (10, "asleep"), (11, "waking")]
    world.answers["status"] = {"jobs": [{"job_id": number, "state": state} for number, state in rows]}
    assert opted_in([due()], world.ask) == OptedIn(frozenset({7}), frozenset({10, 11}))
    assert [one.result for one in act(world, due(verb="suspend"))] == ["done"]
    assert world.cancelled == ["suspend 7"]
    assert "Suspended" in world.mails[0].text
    world.errors["suspend"] = AnswerError("steps", "job 7 has steps", hint=None, exit_code=1)
    assert [one.result for one in act(world, due(squatter(subject=job(submit=NOW)), verb="suspend"))] == ["gone"]
    world.answers["status"] = UnreachableError("no agent")
    assert opted_in([due()], world.ask) == OptedIn()


@pytest.mark.parametrize(
    ("code", "limit", "result", "verb"),
    [("host-memory", 5, "done", "cancel"), ("host-memory", 0, "failed", "suspend"),
     ("under-way", 5, "failed", "suspend"), ("already-suspended", 5, "gone", "suspend")],
)  # fmt: skip
def test_what_cannot_be_suspended_is_cancelled(world: World, code: str, limit: int, result: str, verb: str) -> None:
    """Within the limit of cancellations; what is being suspended already is left to that."""
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
def test_the_agent_decides_about_a_process(world: World, code: str, result: str) -> None:
    """By number and start; it looks itself."""
    answer = {"ended_by": "SIGTERM"} if not code else AnswerError(code, code, hint=None, exit_code=1)
    world.answers["kill-orphan"] = answer
    [outcome] = act(world, due(orphan(), "kill-process"))
    assert outcome.result == result
    assert world.asked == [("n1", {"verb": "kill-orphan", "pid": 4242, "start_ticks": 99887})]
    assert world.log.history()[0].node == "n1"


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


# --- telling


def warning(finding: Finding | None = None, number: int = 1, verb: str = "warn-user", **settings: Any) -> Action:
    return replace(due(finding, verb, **settings), number=number)


def test_a_user_gets_one_mail_about_all_his_jobs(world: World) -> None:
    """And another user another one; administrators theirs."""
    bobs = squatter(user="bob", subject=job(job_id=9))
    actions = [
        warning(), warning(squatter(subject=job(job_id=8, id="8"))), warning(bobs), warning(orphan(), 0, "warn-admin"),
    ]  # fmt: skip
    outcomes = tell(actions, world.tools(), world.log.ledger(NOW))
    assert [one.result for one in outcomes] == ["done"] * 4
    assert [mail.recipient for mail in world.mails] == ["alice@example.org", "bob@example.org", "ops@example.org"]
    assert "Job 8" in world.mails[0].text
    assert world.log.ledger(NOW).warnings[squatter().key][0].number == 1


def test_the_shape_of_a_users_jobs_is_told_once_in_a_time(world: World) -> None:
    """All jobs of that kind in one mail; another job of the same kind a minute later is no other matter."""
    before = world.log.ledger(NOW)
    shapes = [warning(squatter(kind="time-limit", subject=job(job_id=n, id=str(n))), 0) for n in (7, 8)]
    assert [one.result for one in tell(shapes, world.tools("r1"), before)] == ["done", "done"]
    assert "Job 7" in world.mails[0].text
    assert "Job 8" in world.mails[0].text
    assert world.log.ledger(NOW).told == {shapes[0].finding.matter: NOW}
    late = warning(squatter(kind="time-limit", subject=job(job_id=9, id="9")), 0)
    assert [one.result for one in tell([late], world.tools("r2"), before)] == ["gone"]
    assert len(world.mails) == 1


def test_nobody_is_told_twice_by_two_runs(world: World) -> None:
    """The second decided on what the first had not done yet."""
    before = world.log.ledger(NOW)
    tell([warning()], world.tools("r1"), before)
    assert [one.result for one in tell([warning()], world.tools("r2"), before)] == ["gone"]
    assert len(world.mails) == 1


def test_what_could_not_be_sent_is_no_warning(world: World) -> None:
    """It is tried again, and nothing follows from it; other users get theirs."""
    world.refuse.add("alice@example.org")
    other = warning(squatter(user="bob", subject=job(job_id=9)))
    outcomes = tell([warning(), other], world.tools(), world.log.ledger(NOW))
    assert [one.result for one in outcomes] == ["failed", "done"]
    assert squatter().key not in world.log.ledger(NOW).warnings
    world.refuse.clear()
    assert tell([warning()], world.tools("r2"), world.log.ledger(NOW))[0].result == "done"


def test_a_copy_to_administrators_alone_is_no_warning(world: World) -> None:
    world.refuse.add("alice@example.org")
    [outcome] = tell([warning(warn_admins=True)], world.tools(), world.log.ledger(NOW))
    assert outcome.result == "failed"
    assert [mail.recipient for mail in world.mails] == ["ops@example.org"]


def test_a_mail_that_is_broken_off_is_written_down(world: World) -> None:
    """It may have been sent."""
    world.post = lambda _: (_ for _ in ()).throw(KeyboardInterrupt())  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        tell([warning()], world.tools(), world.log.ledger(NOW))
    [record] = world.log.history()
    assert (record.verb, record.result, "broken off" in record.reason) == ("warn-user", "failed", True)


def test_mails_have_a_limit(world: World) -> None:
    """Of one run."""
    world.policy = parse_policy(MAIL + "[limits]\nmails = 1", where="z")
    others = [warning(), warning(squatter(user="bob", subject=job(job_id=9)))]
    assert [one.result for one in tell(others, world.tools(), world.log.ledger(NOW))] == ["done", "spared"]


def test_a_look_is_written_down_with_what_was_decided(world: World) -> None:
    """Also where nothing was done."""
    actions = plan([squatter(subject=job(name=HOSTILE))], world.policy, world.log.ledger(NOW), NOW)
    world.log.record([looked(actions, Who("r", "root@x"), NOW, "clean")])
    [record] = world.log.history()
    assert (record.verb, record.result) == ("look", "seen")
    assert record.evidence[0]["code"] == actions[0].code


def test_warned_warned_cancelled(world: World) -> None:
    """The whole way, run by run, with a policy of the site."""
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
        done = [*execute(actions, world.tools(f"r{minutes}")), *tell(actions, world.tools(f"r{minutes}"), ledger)]
        seen += [f"{minutes}: {one.action.verb}{one.action.number or ''} {one.result}" for one in done]
        if world.cancelled:
            break
    assert seen == ["60: warn-user1 done", "90: warn-user2 done", "120: cancel done"]
