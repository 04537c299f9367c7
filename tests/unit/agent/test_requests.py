"""Requests to the daemon: permissions, results, and malformed input."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_stand_ins import ALICE, BOB, NOW, ROOT, Node1, agent, ask, config_of, job, waiting, watched
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import DEADLINE_S, wait_until

from slurm_affinode.agent import client, control, daemon
from slurm_affinode.agent.client import AnswerError, ask_local
from slurm_affinode.agent.listeners import listen_unix
from slurm_affinode.agent.requests import Caller
from slurm_affinode.agent.service import CONNECTS_S
from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.model.cluster import Job, Step
from slurm_affinode.model.suspension import JobKey, Phase, Refusal, RefusalCode
from slurm_affinode.suspension import refusals
from slurm_affinode.suspension.job.registry import WatchedJob
from slurm_affinode.suspension.records.shared_state import SuspendedJob


def asleep(job_id: int = 8, uid: int = 2001) -> SuspendedJob:
    return SuspendedJob(
        JobKey("test", job_id, 1), uid, "c1", 1, 1000.0, 1 << 30, 1 << 29, 1, "shared", "auto", "idle 15m", None
    )


def test_status_is_for_owner_and_administrators(tmp_path: Path) -> None:
    """Other users are refused, and do not see the job in the list."""
    with agent(config_of(tmp_path, agent='admins = ["boss"]')) as node:
        watched(node)
        node.daemon.registry.change(7, lambda item: replace(item, uid=2001))
        boss, slurm = Caller(3000, "boss", True), Caller(64030, "slurm", True)
        for caller in (ALICE, ROOT, boss):
            assert ask(node, caller, verb="status", job=7)["jobs"][0]["uid"] == 2001
            assert len(ask(node, caller, verb="status")["jobs"]) == 1
        wait_until("SlurmUser is known", lambda: len(ask(node, slurm, verb="status")["jobs"]), lambda n: n == 1)
        assert ask(node, BOB, verb="status")["jobs"] == []
        for verb in ("status", "suspend", "wake"):
            with pytest.raises(Exception, match="job 7 is not yours"):
                ask(node, BOB, verb=verb, job=7)


def test_suspend_on_request(node: Node1) -> None:
    """It begins at once, idle or not; a second request reports that it is in progress."""
    node.gpus.util_pct[0] = 100.0
    watched(node)
    node.daemon.registry.change(7, lambda item: replace(item, uid=2001))
    assert ask(node, ALICE, verb="suspend", job=7)["begun"] is True
    with pytest.raises(Exception, match="is being worked on: suspending"):
        ask(node, ALICE, verb="suspend", job=7)
    node.acts.go.set()
    wait_until("it is done", lambda: node.acts.suspended_jobs, lambda done: done == [(7, "requested by alice")])
    assert node.acts.last_samples == [None]


def by_record(watched: WatchedJob) -> list[Refusal]:
    """Refuse a job based on slurmctld's record alone."""
    return (
        [Refusal(RefusalCode.SLURM, "not reported")]
        if watched.slurm is None
        else refusals.of_steps(refusals.JobFacts.of(watched.slurm))
    )


@pytest.mark.parametrize("before", ["no record", "record with a step that has ended"])
def test_suspend_request_is_decided_by_current_record(
    node: Node1, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """slurmctld is queried at once, regardless of the agent's interval, and even if the job has run a step before."""
    watched(node)
    step = Step(7, "0", "hostname", "RUNNING", ("c1",), NOW, 1, None)
    old = None if before == "no record" else job(7, steps=(step,))
    node.daemon.loop.states[7].inspected_s = node.daemon.loop.clock() + 3600.0
    node.daemon.registry.change(7, lambda item: replace(item, slurm=old))
    monkeypatch.setattr(node.acts, "refusals", by_record)
    node.slurm.down = True
    with pytest.raises(control.RequestError) as caught:
        ask(node, verb="suspend", job=7)
    assert caught.value.code == ("slurm" if old is None else "srun-steps")
    node.slurm.down = False
    assert ask(node, verb="suspend", job=7)["begun"] is True
    node.acts.go.set()


def test_step_that_has_ended_does_not_prevent_suspension(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record was read while a step ran; the check of the refusals requests it again."""
    watched(node)
    step = Step(7, "0", "hostname", "RUNNING", ("c1",), NOW, 1, None)
    node.daemon.registry.change(7, lambda item: replace(item, slurm=job(7, steps=(step,))))
    monkeypatch.setattr(node.acts, "refusals", by_record)
    node.daemon.loop.refusals(7)
    wait_until("the record is current", lambda: by_record(node.daemon.registry.get(7)) == [])  # type: ignore[arg-type]


def test_status_of_a_job_has_its_kinds_and_remedies(node: Node1) -> None:
    """For each mode; not in the list of all jobs. The refusal of a request has the remedy as its hint."""
    watched(node)
    node.acts.refused.append(Refusal(RefusalCode.MPS, "it uses MPS"))
    (row,) = ask(node, verb="status", job=7)["jobs"]
    assert row["compatibility"] == {
        "kinds": ["batch script"],
        "modes": {
            "requeue": {
                "possible": False,
                "against": [{"code": "mps", "text": "it uses MPS", "remedy": "start it without MPS"}],
            },
            "inplace": {"possible": True, "against": []},
        },
    }
    assert ask(node, verb="status")["jobs"][0]["compatibility"] is None
    with pytest.raises(control.RequestError, match="it uses MPS") as caught:
        ask(node, verb="suspend", job=7)
    assert caught.value.hint == "start it without MPS"
    node.acts.refused[:] = [Refusal(RefusalCode.RDMA, "it uses RDMA")]
    modes = ask(node, verb="status", job=7)["jobs"][0]["compatibility"]["modes"]
    assert modes["requeue"]["against"][0]["remedy"] == "submit it with mode=inplace"
    node.daemon.registry.set_phase(7, Phase.LOCKED)
    assert ask(node, verb="status", job=7)["jobs"][0]["compatibility"] is None


def test_suspend_on_request_is_refused_with_reason(node: Node1) -> None:
    """Each refusal has its code: cannot be suspended, already suspended, not opted in, unknown."""
    watched(node)
    node.acts.refused.append(Refusal(RefusalCode.HOST_MEMORY, "needs 80 GiB"))
    node.acts.asleep.append(asleep(8))
    node.slurm.all[8] = waiting(8)
    node.slurm.all[9] = job(9)
    ask(node, verb="prolog", job=9, uid=2001)
    for job_id, code in ((7, "host-memory"), (8, "already-suspended"), (9, "not-opted-in"), (10, "unknown-job")):
        with pytest.raises(control.RequestError) as caught:
            ask(node, verb="suspend", job=job_id)
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"batch": False}, "interactive", "job 9 cannot be suspended: interactive: it is interactive"),
        ({"batch": False, "het_job_id": 9}, "heterogeneous", "its parts cannot be suspended as one"),
        ({}, "not-opted-in", "submitted without --gpu-suspend-idle"),
        ({"batch_host": "c2"}, "unknown-job", "is known on c2"),
    ],
)
def test_job_without_shepherd_is_explained(node: Node1, change: dict[str, Any], code: str, message: str) -> None:
    """slurmctld knows its kind; for a batch job the node of its script knows more."""
    ask(node, verb="prolog", job=9, uid=2001)
    node.slurm.all[9] = job(9, **change)
    with pytest.raises(control.RequestError, match=message) as caught:
        ask(node, ALICE, verb="status", job=9)
    assert caught.value.code == code
    with pytest.raises(control.RequestError, match="not yours"):
        ask(node, BOB, verb="status", job=9)


@pytest.mark.parametrize(
    ("age_s", "code"), [(0.0, "starting"), (CONNECTS_S - 5, "starting"), (CONNECTS_S + 1, "not-opted-in")]
)
def test_job_that_has_just_started_is_not_reported_without_option(node: Node1, age_s: float, code: str) -> None:
    """Its shepherd connects after the prolog."""
    ask(node, verb="prolog", job=9, uid=2001)
    node.slurm.all[9] = job(9, start=datetime.fromtimestamp(time.time() - age_s, UTC))
    for verb in ("status", "suspend"):
        with pytest.raises(control.RequestError) as caught:
            ask(node, ALICE, verb=verb, job=9)
        assert caught.value.code == code


def test_job_is_not_reported_without_option_by_agent_that_has_just_started(node: Node1) -> None:
    """Shepherds connect again to a new agent."""
    node.daemon.service.began = time.time()
    ask(node, verb="prolog", job=9, uid=2001)
    node.slurm.all[9] = job(9)
    with pytest.raises(control.RequestError, match="the agent on c1 has just started") as caught:
        ask(node, ALICE, verb="suspend", job=9)
    assert caught.value.code == "starting"


def test_job_is_not_reported_without_option_while_slurmctld_does_not_respond(node: Node1) -> None:
    """It may have started a moment ago, and its shepherd not be connected."""
    ask(node, verb="prolog", job=9, uid=2001)
    node.slurm.down = True
    with pytest.raises(control.RequestError, match="the state of job 9 is unknown") as caught:
        ask(node, ALICE, verb="suspend", job=9)
    assert (caught.value.code, caught.value.exit_code) == ("no-answer", 3)
    node.daemon.service.began = time.time()
    with pytest.raises(control.RequestError, match="the agent on c1 has just started"):
        ask(node, ALICE, verb="suspend", job=9)


def test_job_being_restored_is_not_reported_without_option(node: Node1) -> None:
    """Its note is deleted and its shepherd not notified yet: the option must not be reported as missing."""
    ask(node, verb="prolog", job=7, uid=2001)
    node.slurm.all[7] = job(7, restarts=1)
    assert node.daemon.work._take(7, "restoring")
    for verb in ("status", "suspend"):
        with pytest.raises(control.RequestError, match="job 7 is being worked on: restoring") as caught:
            ask(node, ALICE, verb=verb, job=7)
        assert caught.value.code == "under-way"
    node.daemon.work._under_way.clear()  # else the agent waits for it at shutdown


def test_job_restored_while_slurmctld_responds_is_not_reported_without_option(
    node: Node1, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow response is common where many requests arrive."""
    ask(node, verb="prolog", job=7, uid=2001)
    node.slurm.all[7] = job(7, restarts=1)
    assert node.daemon.work._take(7, "restoring")
    slowly = node.daemon.service._slurms

    def restored_meanwhile(job_id: int, caller: Caller) -> tuple[Job | None, bool]:
        node.daemon.work._under_way.clear()
        return slowly(job_id, caller)

    monkeypatch.setattr(type(node.daemon.service), "_slurms", lambda _, *arguments: restored_meanwhile(*arguments))
    with pytest.raises(control.RequestError, match="job 7 is being worked on: restoring"):
        ask(node, ALICE, verb="suspend", job=7)


def test_job_being_restored_elsewhere_is_not_reported_as_suspended(node: Node1) -> None:
    """The restore is long: its note exists, and Slurm has started it on another node."""
    node.acts.asleep.append(asleep(8))
    node.slurm.all[8] = job(8, restarts=1)
    with pytest.raises(control.RequestError, match="job 8 is being worked on: restoring") as caught:
        ask(node, verb="suspend", job=8)
    assert caught.value.code == "under-way"


def test_ending_job_is_not_reported_without_option(node: Node1) -> None:
    """Its script has ended, and its epilog has not run yet: the option must not be reported as missing."""
    ask(node, verb="prolog", job=7, uid=2001)
    shepherd = watched(node, option="window=3600")
    shepherd.send("exit\nstatus=0")
    shepherd.close()
    wait_until("it is watched no more", node.daemon.registry.jobs, lambda jobs: not jobs)
    for verb in ("status", "suspend", "wake"):
        with pytest.raises(control.RequestError, match="job 7 is ending") as caught:
            ask(node, ALICE, verb=verb, job=7)
        assert caught.value.code == "ending"


@pytest.mark.parametrize("prolog", [True, False])
def test_job_of_the_plugin_of_another_release_is_not_reported_without_option(
    node: Node1, monkeypatch: pytest.MonkeyPatch, prolog: bool
) -> None:
    """An agent of the other release has admitted its shepherd; this one may have started since its prolog."""
    monkeypatch.setattr(node.daemon.announcements, "_owner", os.getuid())
    directory = node.daemon.announcements._directory
    directory.mkdir(mode=0o755, exist_ok=True)
    (directory / "9").write_text("version=1\njob=9\n")
    node.slurm.all[9] = job(9, uid=2001)
    if prolog:
        ask(node, verb="prolog", job=9, uid=2001)
    with pytest.raises(control.RequestError, match="version 1, this agent reads 2: the plugin is of another") as caught:
        ask(node, ALICE, verb="suspend", job=9)
    assert caught.value.code == "plugin-release"
    with pytest.raises(control.RequestError, match="job 9 is not yours"):
        ask(node, BOB, verb="suspend", job=9)


@pytest.mark.parametrize("what", ["never watched", "watched", "suspended"])
@pytest.mark.parametrize(
    ("state", "message"), [("CANCELLED", "job 9 has ended: CANCELLED"), (None, "job 9 has ended$")]
)
def test_ended_job_is_reported_as_ended(node: Node1, what: str, state: str | None, message: str) -> None:
    """Stale data remains if the epilog did not run or an image is left. ``None``: Slurm no longer knows the job."""
    if what == "suspended":
        node.acts.asleep.append(asleep(9))
    else:
        ask(node, verb="prolog", job=9, uid=2001)
    if what == "watched":
        node.daemon.service.record_departure(9)
    node.slurm.all.pop(9, None)
    if state is not None:
        node.slurm.all[9] = job(9, state=state)
    if (what, state) == ("suspended", None):  # slurmctld may have lost its state, and the image may be needed
        assert ask(node, ALICE, verb="status", job=9)["jobs"][0]["state"] == "suspended"
        return
    with pytest.raises(control.RequestError, match=message) as caught:
        ask(node, ALICE, verb="suspend", job=9)
    assert caught.value.code == "ended"


@pytest.mark.parametrize(("rule", "code"), [({"min_run_s": 86400.0}, "min-run"), ({"backoff_s": 86400.0}, "backoff")])
def test_suspend_on_request_respects_limits(node: Node1, rule: dict[str, float], code: str) -> None:
    """An attempt that is too short, or a job suspended recently, is refused; an administrator may force it."""
    busy(node)
    node.daemon.loop.policy = replace(node.daemon.loop.policy, **rule)  # type: ignore[arg-type]
    node.daemon.registry.change(7, lambda item: replace(item, suspensions=3))
    for caller in (ALICE, ROOT):
        with pytest.raises(control.RequestError, match="cannot be suspended yet") as caught:
            ask(node, caller, verb="suspend", job=7)
        assert caught.value.code == code
    with pytest.raises(control.RequestError, match="only administrators") as caught:
        ask(node, ALICE, verb="suspend", job=7, force=True)
    assert caught.value.code == "not-permitted"
    assert ask(node, ROOT, verb="suspend", job=7, force=True)["begun"] is True
    node.acts.go.set()


def test_suspend_on_request_waits_until_earlier_suspensions_are_known(
    node: Node1, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after a restore, the job has slurmctld's record, but its image and restores were not read yet."""
    busy(node)
    node.daemon.registry.change(7, lambda item: replace(item, key=None, suspensions=0))

    def unreadable(job: WatchedJob) -> tuple[JobKey, int]:
        raise AffinodeError("the store does not respond")

    monkeypatch.setattr(node.acts, "identify", unreadable)
    with pytest.raises(control.RequestError) as caught:
        ask(node, ALICE, verb="suspend", job=7)
    assert caught.value.code == "run-unknown"
    monkeypatch.setattr(node.acts, "identify", lambda job: (JobKey("test", 7, 1), 3))
    node.daemon.loop.policy = replace(node.daemon.loop.policy, backoff_s=86400.0)
    with pytest.raises(control.RequestError) as caught:
        ask(node, ALICE, verb="suspend", job=7)
    assert caught.value.code == "backoff"


def busy(node: Node1) -> None:
    """Start a busy job 7 of alice, which is suspended only on request."""
    node.gpus.util_pct[0] = 100.0
    watched(node)
    node.daemon.registry.change(7, lambda item: replace(item, uid=2001))


def test_suspend_on_request_backs_off(node: Node1) -> None:
    """The required run time doubles after each suspension that failed, or was in place."""
    busy(node)
    clock = [1000.0]
    node.daemon.loop.clock = lambda: clock[0]

    def code() -> str:
        try:
            ask(node, ALICE, verb="suspend", job=7)
        except control.RequestError as error:
            return error.code
        wait_until("it is over", node.daemon.work.under_way, lambda jobs: not jobs)
        return "begun"

    node.acts.go.set()
    backoff = node.daemon.loop.policy.backoff_s
    result = []
    for seconds in (0.0, 0.0, backoff - 1, 1, backoff, backoff):
        clock[0] += seconds
        result.append(code())
    assert result == ["begun", "backoff", "backoff", "begun", "backoff", "begun"]


def test_wake_on_request(node: Node1) -> None:
    """A suspended job is released for its owner; a running job is refused."""
    watched(node)
    node.acts.asleep.append(asleep(8))
    node.slurm.all[8] = waiting(8)
    row = ask(node, ALICE, verb="status", job=8)["jobs"][0]
    assert (row["state"], row["gpu_bytes"], row["where"]) == ("suspended", 1 << 29, "shared")
    with pytest.raises(Exception, match="not yours"):
        ask(node, BOB, verb="wake", job=8)
    assert ask(node, ALICE, verb="wake", job=8)["released"] is True
    assert node.acts.woken == [(8, "alice")]
    with pytest.raises(Exception, match="job 7 is not suspended: it is running"):
        ask(node, verb="wake", job=7)


def test_job_in_another_phase_is_not_suspended(node: Node1) -> None:
    """Another operation on the job is in progress."""
    watched(node)
    node.daemon.registry.set_phase(7, Phase.DUMPED)
    with pytest.raises(Exception, match="being worked on: dumped"):
        ask(node, verb="suspend", job=7)
    assert ask(node, verb="status", job=7)["jobs"][0]["state"] == "dumped"


def test_prolog_and_epilog_are_for_root_on_the_node(node: Node1) -> None:
    """Neither users nor root on another node may report the end of a job."""
    for caller in (ALICE, replace(ROOT, local=False)):
        for verb in ("prolog", "epilog"):
            with pytest.raises(Exception, match="is for root on the node itself"):
                ask(node, caller, verb=verb, job=7, uid=0)


@pytest.mark.parametrize(
    "request_",
    [{}, {"verb": "reboot"}, {"verb": "status", "job": "7"}, {"verb": "suspend"}, {"verb": "wake", "job": -1},
     {"verb": "suspend", "job": True}, {"verb": "status", "job": 1 << 40}, {"verb": "prolog", "job": 7, "uid": []}],
)  # fmt: skip
def test_malformed_request_is_rejected(node: Node1, request_: dict[str, Any]) -> None:
    """The exit status is that of a usage error."""
    with pytest.raises(control.RequestError) as caught:
        node.daemon.service.answer(request_, ROOT)
    assert caught.value.exit_code == 2


def test_request_through_socket_is_answered(node: Node1) -> None:
    """The kernel identifies the client; refusals have their code, hint and exit status."""
    watched(node)
    assert ask_local(node.run_dir, {"verb": "status"})["jobs"][0]["job_id"] == 7
    with pytest.raises(AnswerError, match="knows no job 99") as caught:
        ask_local(node.run_dir, {"verb": "status", "job": 99})
    assert (caught.value.code, caught.value.exit_code) == ("unknown-job", 1)
    assert caught.value.hint
    node.daemon.service.began = time.time()
    with pytest.raises(AnswerError, match="c1 has just started: it may not know job 99 yet") as caught:
        ask_local(node.run_dir, {"verb": "status", "job": 99})
    assert caught.value.code == "starting"


def test_stopped_agent_is_unreachable(tmp_path: Path) -> None:
    """The exit status is 3, and the error gives the path of the socket."""
    with pytest.raises(UnreachableError, match=r"control\.sock: no agent runs on this node") as caught:
        ask_local(tmp_path, {"verb": "status"})
    assert caught.value.exit_code == 3


def test_too_long_socket_path_is_reported(tmp_path: Path) -> None:
    """The error must not claim that another agent is running there."""
    path = tmp_path / ("x" * 110) / "control.sock"
    path.parent.mkdir()
    with pytest.raises(UnreachableError, match="cannot listen there: AF_UNIX path too long"):
        listen_unix(path, socket.SOCK_STREAM)


def connect(node: Node1) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(DEADLINE_S)
    sock.connect(str(node.run_dir / "control.sock"))
    return sock


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.one_of(st.binary(max_size=40000), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(
    lambda value: json.dumps(value).encode()
), st.fixed_dictionaries({"service": st.just("slurm-affinode"), "verb": st.sampled_from(["status", "wake", "epilog"]),
                          "job": st.one_of(st.integers(), st.text(), st.none(), st.floats(allow_nan=True))}).map(
    lambda value: json.dumps(value).encode())))  # fmt: skip
def test_any_request_is_answered_or_closed(node: Node1, data: bytes) -> None:
    """Garbage, oversized and deeply nested requests yield one JSON line with an error, or nothing."""
    with connect(node) as sock:
        try:
            sock.sendall(data + b"\n")
            answer = sock.makefile("rb").read()
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
    if answer:
        assert json.loads(answer)["ok"] in (True, False)
    assert ask_local(node.run_dir, {"verb": "status"})["ok"] is True


def test_deeply_nested_json_is_rejected(node: Node1) -> None:
    """It must not overflow the stack."""
    with connect(node) as sock:
        sock.sendall(b"[" * 16000 + b"\n")
        assert json.loads(sock.makefile("rb").read())["error"]["code"] == "bad-request"


def test_slow_and_excess_connections_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle connections time out, the number per user is limited, and root is always served."""
    as_root(monkeypatch)
    monkeypatch.setattr(control, "MAX_PER_HOLDER", 4)
    with agent(config_of(tmp_path)) as node:
        slow = [connect(node) for _ in range(8)]
        slow[0].send(b"{")
        assert ask_local(node.run_dir, {"verb": "status"})["ok"] is True
        for error in (json.loads(item.makefile("rb").read())["error"] for item in slow[4:]):
            assert (error["code"], error["exit_code"]) == ("too-often", 3)
            assert "too many connections of yours" in error["message"]
        monkeypatch.setattr(control, "REQUEST_S", 0.1)
        slow.append(connect(node))  # triggers the check for late connections
        assert [connection.recv(10) for connection in slow[:4]] == [b""] * 4
        for entry in slow:
            entry.close()


def control_peer(uid: int) -> Any:
    """Return a peer with this user ID."""
    return type("Peer", (), {"uid": uid, "gid": uid, "pid": os.getpid()})()


def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identify clients of root's socket as root and those of the other one as alice; the commands run as root."""
    monkeypatch.setattr(client, "os", SimpleNamespace(geteuid=lambda: 0))
    monkeypatch.setattr(
        control, "peer_of", lambda sock: control_peer(0 if sock.getsockname().endswith("root.sock") else 2001)
    )


def test_prolog_is_not_delayed_by_requests_of_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not respond blocks the requests of users, but no starting job."""
    as_root(monkeypatch)
    store = threading.Event()
    with agent(config_of(tmp_path)) as node:
        monkeypatch.setattr(node.acts, "suspended", lambda: store.wait(DEADLINE_S) and ())
        users = [connect(node) for _ in range(12)]
        for user in users:
            user.sendall(b'{"service": "slurm-affinode", "verb": "status"}\n')
        try:
            answer = ask_local(
                node.run_dir, {"verb": "prolog", "job": 9, "uid": 2001, "gpus": [0]}, timeout_s=DEADLINE_S
            )
        finally:
            store.set()
        assert answer["job_id"] == 9
        for user in users:
            assert json.loads(user.makefile("rb").read())["ok"] is True
            user.close()


def test_busy_driver_does_not_block_queries_to_slurmctld(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals are then unknown for a while; status reports the rest, and the queue is still queried."""
    began, moved, calls = threading.Event(), threading.Event(), []
    watched(node)
    node.daemon.loop.states[7].refusals_s = -1e9
    monkeypatch.setattr(node.acts, "refusals", lambda job: (began.set(), moved.wait(DEADLINE_S), ())[-1])
    monkeypatch.setattr(daemon, "CALL_S", 0.2)
    assert ask(node, ROOT, verb="status", job=7)["jobs"][0]["job_id"] == 7
    assert began.is_set()
    monkeypatch.setattr(daemon, "CALL_S", DEADLINE_S)
    node.daemon._slurm_calls(lambda: calls.append(moved.is_set()))
    moved.set()
    assert calls == [False]


def test_prolog_is_served_if_public_socket_is_full(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users may connect faster than the agent accepts; root has its own socket."""
    as_root(monkeypatch)
    assert (node.run_dir / "root.sock").stat().st_mode & 0o777 == 0o600
    (node.run_dir / "control.sock").unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as full, contextlib.ExitStack() as crowd:
        full.bind(str(node.run_dir / "control.sock"))
        full.listen(0)
        for _ in range(3):
            item = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            item.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                item.connect(str(node.run_dir / "control.sock"))
        answer = ask_local(node.run_dir, {"verb": "prolog", "job": 9, "uid": 2001, "gpus": [0]}, timeout_s=DEADLINE_S)
        assert answer["job_id"] == 9
        (node.run_dir / "root.sock").unlink()  # as with an agent of an older version
        with pytest.raises(UnreachableError, match=r"control\.sock: the agent does not respond"):
            ask_local(node.run_dir, {"verb": "status"}, timeout_s=0.1)


def test_abandoned_queries_are_dropped(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries abandoned while slurmctld did not respond do not delay later ones."""
    monkeypatch.setattr(daemon, "CALL_S", 0.02)
    responds, calls = threading.Event(), []
    node.daemon._slurm.post(lambda: responds.wait(DEADLINE_S) and None)
    for number in range(5):
        node.daemon._slurm_calls(lambda number=number: calls.append(number))
    monkeypatch.setattr(daemon, "CALL_S", DEADLINE_S)
    responds.set()
    node.daemon._slurm_calls(lambda: calls.append(99))
    assert calls == [99]
