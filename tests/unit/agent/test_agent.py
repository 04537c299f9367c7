"""The daemon: it samples, decides, acts, and answers those who may ask."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_stand_ins import WAIT_S, Gpus, Node1, Shepherd, Slurm, agent, config_of, job, wait_until, waiting
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_affinode.agent import control
from slurm_affinode.agent.client import AnswerError, ask_local
from slurm_affinode.agent.interface import SuspendedJob
from slurm_affinode.agent.promises import Promises
from slurm_affinode.agent.queue import waiting_of
from slurm_affinode.agent.service import Caller
from slurm_affinode.errors import UnreachableError
from slurm_affinode.model.suspension import JobKey, Phase, Refusal

ALICE, BOB, ROOT = Caller(2001, "alice", True), Caller(2002, "bob", True), Caller(0, "root", True)
OPTION = "window=1,when=pressure"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node1]:
    with agent(config_of(tmp_path)) as running:
        yield running


def ask(node: Node1, caller: Caller = ROOT, **request: Any) -> dict[str, Any]:
    return node.daemon.service.answer(request, caller)


def asleep(job_id: int = 8, uid: int = 2001) -> SuspendedJob:
    return SuspendedJob(
        JobKey("test", job_id, 1), uid, "c1", 1, 1000.0, 1 << 30, 1 << 29, 1, "shared", "auto", "idle 15m", None
    )


def watched(node: Node1, **fields: object) -> Shepherd:
    shepherd = Shepherd(node.run_dir, **fields).hello()
    node.watched()
    return shepherd


# --- deciding and acting


def test_idle_job_is_suspended(node: Node1) -> None:
    """After its window, once, with the reason, and after one more look."""
    node.acts.go.set()
    watched(node, option="window=1,when=always")
    wait_until("it is suspended", lambda: node.acts.suspended_jobs)
    assert node.acts.suspended_jobs[0] == (7, "idle 1 s")
    assert node.acts.looks[0] is None


def test_when_a_window_will_be_full_is_known(node: Node1) -> None:
    """So that it is looked at then; a job that is busy has no window."""
    assert node.daemon.loop.full_s() is None
    watched(node, option="window=3600,when=always")
    state = wait_until(
        "it is idle", lambda: node.daemon.loop.states[7].detector.state, lambda one: one is not None and one.since_s
    )
    assert node.daemon.loop.full_s() == state.since_s + 3600
    node.gpus.util_pct[0] = 12.0
    wait_until("it is busy", lambda: node.daemon.loop.full_s() is None)


def test_busy_job_is_left_alone(node: Node1) -> None:
    """As long as one signal of one GPU is above its limit."""
    node.gpus.util_pct[0] = 12.0
    watched(node, option="window=1,when=always")
    row = wait_until(
        "it was seen busy", lambda: ask(node, verb="status", job=7)["jobs"][0], lambda one: bool(one["idle"])
    )
    assert row["idle"]["verdict"] == "busy"
    assert row["next"]["code"] == "busy"
    assert row["idle"]["signals"][0] == {
        "of": "GPU 0", "name": "utilization", "value": 12.0, "limit": 0.0, "verdict": "busy",
    }  # fmt: skip


def test_job_that_wakes_up_at_the_last_moment_is_left_alone(node: Node1) -> None:
    """What the look under the lock shows is handed to the orchestration."""
    watched(node, option="window=1,when=always")
    assert node.acts.begun.wait(WAIT_S)  # the agent's own last look is behind it
    node.gpus.util_pct[0] = 50.0
    node.acts.go.set()
    looks = wait_until("it looked again", lambda: node.acts.looks)
    assert looks[0] == "GPU 0: utilization 50 is above 0"


def test_only_a_waiting_job_makes_pressure(node: Node1) -> None:
    """slurmctld is asked while the job is idle; then a job that waits for its GPU costs it its place."""
    node.acts.go.set()
    watched(node, option=OPTION)
    wait_until(
        "its window is full", lambda: ask(node, verb="status", job=7)["jobs"][0]["next"],
        lambda after: after is not None and after["code"] == "no-pressure",
    )  # fmt: skip
    node.slurm.all[99] = waiting()
    wait_until("it is suspended", lambda: node.acts.suspended_jobs)
    assert "1 job waits for its GPUs (99)" in node.acts.suspended_jobs[0][1]


def test_slurmctld_away_and_back(node: Node1) -> None:
    """Nothing is done on what is not known; when it is back, what was waiting is done."""
    node.acts.go.set()
    node.slurm.down = True
    assert Shepherd(node.run_dir, option=OPTION).hello().hear() == "start"
    node.slurm.all[99] = waiting()
    row = wait_until(
        "the agent says what it does not know", lambda: ask(node, verb="status", job=7)["jobs"][0],
        lambda one: one["next"] is not None and one["next"]["against"],
    )  # fmt: skip
    assert {one["code"] for one in row["next"]["against"]} >= {"queue-unknown", "run-unknown"}
    assert not node.acts.suspended_jobs
    node.slurm.down = False
    with node.daemon.loop._lock:
        node.daemon.loop.states[7].asked_s = -1e9
    wait_until("it is suspended", lambda: node.acts.suspended_jobs)


def test_driver_lost_and_back(node: Node1) -> None:
    """Unknown is not idle; afterwards the window goes on with what is seen."""
    watched(node, option="window=1,when=always")
    node.gpus.missing = True
    wait_until(
        "it is unknown", lambda: ask(node, verb="status", job=7)["jobs"][0]["idle"]["verdict"],
        lambda verdict: verdict == "unknown",
    )  # fmt: skip
    node.gpus.missing = False
    node.acts.go.set()
    wait_until("it is suspended", lambda: node.acts.suspended_jobs)


def test_gpu_that_falls_off_the_bus(node: Node1) -> None:
    """The job is unknown from then on, and the reason is shown."""
    node.gpus.lost.add(0)
    watched(node, option="window=1,when=always")
    row = wait_until(
        "it was sampled", lambda: ask(node, verb="status", job=7)["jobs"][0], lambda one: one["idle"] is not None
    )
    assert row["idle"]["why"] == "GPU 0: GPU 0: GPU is lost"
    assert not node.acts.suspended_jobs


def test_refusals_are_shown_and_kept_to(node: Node1) -> None:
    """By their names; nothing is begun."""
    node.acts.refused.append(Refusal("srun-steps", "it runs srun steps"))
    watched(node, option="window=1,when=always")
    row = wait_until(
        "its window is full", lambda: ask(node, verb="status", job=7)["jobs"][0],
        lambda one: one["next"] is not None and one["next"]["code"] == "srun-steps",
    )  # fmt: skip
    assert row["next"]["against"][0] == {"code": "srun-steps", "text": "it runs srun steps"}
    assert not node.acts.suspended_jobs


def test_dry_run_only_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the log and to those who ask."""
    with agent(config_of(tmp_path, suspend="dry_run = true")) as node, caplog.at_level("INFO"):
        node.acts.go.set()
        watched(node, option="window=1,when=always")
        wait_until("it is said", lambda: caplog.text, lambda text: "job 7: idle 1 s: would be suspended" in text)
        assert ask(node, verb="status", job=7)["dry_run"] is True
        assert not node.acts.suspended_jobs


def test_loop_goes_on_while_a_suspension_takes_long(node: Node1) -> None:
    """Sampling of the others stays regular."""
    watched(node, option="window=1,when=always")
    wait_until("a suspension begins", lambda: node.daemon.work.under_way().get(7))
    with node.daemon.registry._lock:
        other = replace(node.daemon.registry._jobs[7], job_id=9)
        node.daemon.registry._jobs[9] = other
    reads = node.gpus.reads
    wait_until("the other is sampled", lambda: node.gpus.reads, lambda now: now > reads + 5)
    assert node.daemon.work.under_way() == {7: "suspending"}


def test_signal_comes_first(node: Node1) -> None:
    """The job is told before, as it asked."""
    node.acts.go.set()
    shepherd = watched(node, option="window=1,when=always,signal=USR1@1")
    assert shepherd.hear() == "start"
    assert shepherd.hear() == "signal\nnumber=10"
    assert not node.acts.suspended_jobs
    wait_until("it is suspended", lambda: node.acts.suspended_jobs)


def test_job_that_was_signalled_takes_nobody_elses_turn(node: Node1) -> None:
    """Another one is suspended meanwhile, one at a time; when the first ends, it is waited for no more."""
    node.acts.go.set()
    shepherd = watched(node, option="window=1,when=always,signal=USR1@3600")
    wait_until("it was signalled", lambda: node.daemon.work.under_way().get(7) == "signalled")
    with node.daemon.registry._lock:
        first = node.daemon.registry._jobs[7]
        node.daemon.registry._jobs[9] = replace(first, job_id=9, option=replace(first.option, signal=None))
    wait_until("the other is suspended", lambda: [job for job, _ in node.acts.suspended_jobs] == [9])
    assert ask(node, verb="status", job=7)["jobs"][0]["state"] == "signalled"
    shepherd.close()
    wait_until("it is let go", lambda: 7 not in node.daemon.work.under_way())
    assert [job for job, _ in node.acts.suspended_jobs] == [9]


def test_waker_is_called_again_and_again(node: Node1) -> None:
    """Whatever the other threads do."""
    wait_until("it was called", lambda: node.acts.ticks, lambda ticks: ticks > 3)


def test_gpus_told_by_the_prolog_come_before_what_slurmctld_says(node: Node1) -> None:
    """And a job whose GPUs nobody names has those on which its processes are."""
    ask(node, verb="prolog", job=7, uid=2001, gpus=[1])
    watched(node)
    assert [device.index for device in node.watched().devices or ()] == [1]


# --- who may ask what


def test_status_is_for_owner_and_administrators(tmp_path: Path) -> None:
    """Others are refused, and do not find it in the list."""
    with agent(config_of(tmp_path, agent='admins = ["boss"]')) as node:
        watched(node)
        node.daemon.registry.change(7, lambda one: replace(one, uid=2001))
        boss, slurm = Caller(3000, "boss", True), Caller(64030, "slurm", True)
        for caller in (ALICE, ROOT, boss):
            assert ask(node, caller, verb="status", job=7)["jobs"][0]["uid"] == 2001
            assert len(ask(node, caller, verb="status")["jobs"]) == 1
        wait_until("SlurmUser is known", lambda: len(ask(node, slurm, verb="status")["jobs"]), lambda n: n == 1)
        assert ask(node, BOB, verb="status")["jobs"] == []
        for verb in ("status", "suspend", "wake"):
            with pytest.raises(Exception, match="job 7 is not yours"):
                ask(node, BOB, verb=verb, job=7)


def test_suspend_by_hand(node: Node1) -> None:
    """Begun at once, idle or not; a second time it says that it is under way."""
    node.gpus.util_pct[0] = 100.0
    watched(node)
    node.daemon.registry.change(7, lambda one: replace(one, uid=2001))
    assert ask(node, ALICE, verb="suspend", job=7)["begun"] is True
    with pytest.raises(Exception, match="is being worked on: suspending"):
        ask(node, ALICE, verb="suspend", job=7)
    node.acts.go.set()
    wait_until("it is done", lambda: node.acts.suspended_jobs, lambda done: done == [(7, "asked by alice")])
    assert node.acts.looks == [None]


def test_suspend_by_hand_is_refused_with_the_reason(node: Node1) -> None:
    """Each refusal by its name: unknown, not opted in, suspended already, cannot be suspended."""
    watched(node)
    node.acts.refused.append(Refusal("host-memory", "needs 80 GiB"))
    node.acts.asleep.append(asleep(8))
    ask(node, verb="prolog", job=9, uid=2001)
    for job_id, code in ((7, "host-memory"), (8, "already-suspended"), (9, "not-opted-in"), (10, "unknown-job")):
        with pytest.raises(control.RequestError) as caught:
            ask(node, verb="suspend", job=job_id)
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"batch": False}, "interactive", "job 9 cannot be suspended: it is interactive"),
        ({"batch": False, "het_job_id": 9}, "heterogeneous", "its parts cannot be suspended as one"),
        ({}, "not-opted-in", "submitted without --gpu-suspend-idle"),
        ({"batch_host": "c2"}, "unknown-job", "is known on c2"),
    ],
)
def test_job_without_a_shepherd_is_told_why(node: Node1, change: dict[str, Any], code: str, said: str) -> None:
    """By its kind, which slurmctld knows; of a batch job the node of its script knows more."""
    ask(node, verb="prolog", job=9, uid=2001)
    node.slurm.all[9] = job(9, **change)
    with pytest.raises(control.RequestError, match=said) as caught:
        ask(node, ALICE, verb="status", job=9)
    assert caught.value.code == code
    with pytest.raises(control.RequestError, match="not yours"):
        ask(node, BOB, verb="status", job=9)


def test_job_that_waits_has_the_promise_of_another_node(tmp_path: Path) -> None:
    """The other node was first: this one's job runs on, its window stands, and status says so."""
    with agent(config_of(tmp_path)) as node:
        other = Promises(tmp_path, "test", "c2", lasts_s=600)
        node.daemon.loop.promises = Promises(tmp_path, "test", "c1", lasts_s=600)
        assert other.take(waiting_of(waiting()), 1)
        node.acts.go.set()
        node.slurm.all[99] = waiting()
        watched(node, option=OPTION)
        row = wait_until(
            "its window is full", lambda: ask(node, verb="status", job=7)["jobs"][0],
            lambda one: one["next"] is not None and one["next"]["code"] == "promised",
        )  # fmt: skip
        assert "(99) get others, of c2" in row["next"]["text"]
        assert not node.acts.suspended_jobs
        other.leave("test.99.0", 1, freed=False)
        wait_until("it is suspended", lambda: node.acts.suspended_jobs)
        assert node.daemon.loop.promises.known()[0].node == "c1"


def test_wake_by_hand(node: Node1) -> None:
    """A suspended job is released for its owner; one that runs is not suspended."""
    watched(node)
    node.acts.asleep.append(asleep(8))
    row = ask(node, ALICE, verb="status", job=8)["jobs"][0]
    assert (row["state"], row["gpu_bytes"], row["where"]) == ("suspended", 1 << 29, "shared")
    with pytest.raises(Exception, match="not yours"):
        ask(node, BOB, verb="wake", job=8)
    assert ask(node, ALICE, verb="wake", job=8)["released"] is True
    assert node.acts.woken == [(8, "alice")]
    with pytest.raises(Exception, match="job 7 is not suspended: it is running"):
        ask(node, verb="wake", job=7)


def test_job_in_another_phase_is_not_touched(node: Node1) -> None:
    """The orchestration has it."""
    watched(node)
    node.daemon.registry.set_phase(7, Phase.DUMPED)
    with pytest.raises(Exception, match="being worked on: dumped"):
        ask(node, verb="suspend", job=7)
    assert ask(node, verb="status", job=7)["jobs"][0]["state"] == "dumped"


def test_prolog_and_epilog_are_for_root_on_the_node(node: Node1) -> None:
    """No user tells the agent that a job has ended, and no root of another node."""
    for caller in (ALICE, replace(ROOT, local=False)):
        for verb in ("prolog", "epilog"):
            with pytest.raises(Exception, match="is for root on the node itself"):
                ask(node, caller, verb=verb, job=7, uid=0)


@pytest.mark.parametrize(("state", "requeued"), [("COMPLETED", False), ("CANCELLED", False), ("PENDING", True)])
def test_epilog_tells_what_became_of_the_job(node: Node1, state: str, requeued: bool) -> None:
    """Images of a job that is over go; those of one that comes again stay."""
    shepherd = watched(node)
    shepherd.send("exit\nstatus=0")
    shepherd.close()
    wait_until("it has left", node.daemon.registry.jobs, lambda jobs: not jobs)
    node.slurm.all[7] = job(state=state)
    ask(node, verb="epilog", job=7, uid=2001)
    assert wait_until("the keeper is told", lambda: node.acts.ended_jobs) == [(7, requeued)]


def test_epilog_says_nothing_that_is_not_known(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """slurmctld does not answer: no image is deleted on a guess."""
    monkeypatch.setattr("slurm_affinode.agent.service.ENDED_WAIT_S", 0.01)
    monkeypatch.setattr("slurm_affinode.agent.service.ENDED_TRIES", 3)
    shepherd = watched(node)
    shepherd.close()
    node.daemon.service.left(7)
    node.slurm.down = True
    ask(node, verb="epilog", job=7, uid=2001)
    wait_until("it has given up", threading.enumerate, lambda all_: not any(one.name == "ended" for one in all_))
    assert node.acts.ended_jobs == []


@pytest.mark.parametrize(
    "request_",
    [{}, {"verb": "reboot"}, {"verb": "status", "job": "7"}, {"verb": "suspend"}, {"verb": "wake", "job": -1},
     {"verb": "suspend", "job": True}, {"verb": "status", "job": 1 << 40}, {"verb": "prolog", "job": 7, "uid": []}],
)  # fmt: skip
def test_nonsense_is_refused(node: Node1, request_: dict[str, Any]) -> None:
    """With usage status."""
    with pytest.raises(control.RequestError) as caught:
        node.daemon.service.answer(request_, ROOT)
    assert caught.value.exit_code == 2


# --- the socket


def test_request_over_the_socket(node: Node1) -> None:
    """The kernel says who asks; refusals keep code, hint and exit status."""
    watched(node)
    assert ask_local(node.run_dir, {"verb": "status"})["jobs"][0]["job_id"] == 7
    with pytest.raises(AnswerError, match="knows no job 99") as caught:
        ask_local(node.run_dir, {"verb": "status", "job": 99})
    assert (caught.value.code, caught.value.exit_code) == ("unknown-job", 1)
    assert caught.value.hint


def test_agent_that_does_not_run_is_unreachable(tmp_path: Path) -> None:
    """Exit status 3, and where it was looked for."""
    with pytest.raises(UnreachableError, match=r"control\.sock: no agent runs on this node") as caught:
        ask_local(tmp_path, {"verb": "status"})
    assert caught.value.exit_code == 3


def connect(node: Node1) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5)
    sock.connect(str(node.run_dir / "control.sock"))
    return sock


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.one_of(st.binary(max_size=40000), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(
    lambda value: json.dumps(value).encode()
), st.fixed_dictionaries({"service": st.just("slurm-affinode"), "verb": st.sampled_from(["status", "wake", "epilog"]),
                          "job": st.one_of(st.integers(), st.text(), st.none(), st.floats(allow_nan=True))}).map(
    lambda value: json.dumps(value).encode())))  # fmt: skip
def test_any_request_is_answered_or_closed(node: Node1, data: bytes) -> None:
    """Garbage, too much of it, deep nesting: one JSON line with an error, or nothing."""
    with connect(node) as sock:
        try:
            sock.sendall(data + b"\n")
            answer = sock.makefile("rb").read()
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
    if answer:
        assert json.loads(answer)["ok"] in (True, False)
    assert ask_local(node.run_dir, {"verb": "status"})["ok"] is True


def test_nested_json_is_no_way_in(node: Node1) -> None:
    """Neither is a stack overflow."""
    with connect(node) as sock:
        sock.sendall(b"[" * 16000 + b"\n")
        assert json.loads(sock.makefile("rb").read())["error"]["code"] == "bad-request"


def test_slow_and_many_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who writes nothing is shown out, who opens too many gets no more, and root is served all the same."""
    monkeypatch.setattr(control, "REQUEST_S", 0.5)
    monkeypatch.setattr(control, "MAX_PER_HOLDER", 4)
    peers = iter([2001] * 8)
    monkeypatch.setattr(control, "peer_of", lambda sock: control_peer(next(peers, 0)))
    with agent(config_of(tmp_path)) as node:
        slow = [connect(node) for _ in range(8)]
        slow[0].send(b"{")
        assert ask_local(node.run_dir, {"verb": "status"})["ok"] is True
        assert [one.recv(10) for one in slow] == [b""] * 8
        for one in slow:
            one.close()


def control_peer(uid: int) -> Any:
    """A peer by its uid."""
    return type("Peer", (), {"uid": uid, "gid": uid, "pid": os.getpid()})()


def test_gpus_are_not_asked_without_a_job(node: Node1) -> None:
    """A node without such jobs costs next to nothing."""
    wait_until("some ticks have passed", lambda: node.acts.ticks, lambda ticks: ticks > 3)
    assert node.gpus.reads == 0
    assert node.slurm.asked == 0
    assert isinstance(node.gpus, Gpus)
    assert isinstance(node.slurm, Slurm)
