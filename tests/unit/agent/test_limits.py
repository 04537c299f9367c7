"""Limits per user and per address on the use of the agent, and through it of slurmctld."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from agent_stand_ins import ALICE, ROOT, Node1, agent, ask, config_of, job, wait_until, waiting

from slurm_affinode.agent import control, daemon, munge, service
from slurm_affinode.agent.client import AnswerError, ask_local, ask_node
from slurm_affinode.agent.munge import BadCredentialError, Message
from slurm_affinode.agent.requests import Caller
from slurm_affinode.agent.throttle import Pace
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.model.suspension import JobKey
from slurm_affinode.suspension.job.peers import Peer
from slurm_affinode.suspension.records.shared_state import SuspendedJob

HOST = "127.0.0.1"


def asleep(job_id: int) -> SuspendedJob:
    """Return a suspended job of alice."""
    return SuspendedJob(
        JobKey("test", job_id, 1), 2001, "c1", 1, 1000.0, 1 << 30, 1 << 29, 1, "shared", "auto", "idle 15m", None
    )


def test_pace_has_burst_and_rate() -> None:
    """They apply per holder; holders beyond the maximum share one limit."""
    now = [100.0]
    pace = Pace(per_s=2.0, burst=3, clock=lambda: now[0], most=2)
    assert [pace.take("a") for _ in range(5)] == [True, True, True, False, False]
    assert [pace.take("b"), pace.take("c"), pace.take("d"), pace.take("e"), pace.take("f")] == [True] * 4 + [False]
    now[0] += 1.0
    assert [pace.take("a") for _ in range(3)] == [True, True, False]
    now[0] += 1000.0
    assert [pace.take("f") for _ in range(4)] == [True, True, True, False]


def test_requests_of_users_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who exceeds the limit is refused in one line, before any work is done."""
    uid = iter([2001] * 4 + [0] * 5)
    monkeypatch.setattr(control, "peer_of", lambda sock: Peer(1, next(uid), 0))
    monkeypatch.setattr(control, "REQUESTS_PER_S", 0.001)
    monkeypatch.setattr(control, "BURST", 3)
    with agent(config_of(tmp_path)) as node:
        for _ in range(3):
            assert ask_local(node.run_dir, {"verb": "status"})["ok"] is True
        with pytest.raises(AnswerError, match="too many requests of yours: ask again in a moment") as caught:
            ask_local(node.run_dir, {"verb": "status"})
        assert caught.value.exit_code == 3
        for _ in range(5):
            assert ask_local(node.run_dir, {"verb": "status"})["ok"] is True


def test_slurmctld_queries_per_user_are_limited(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """For unwatched jobs, responses are cached for a moment, and further queries are limited."""
    for job_id in range(10, 35):
        ask(node, verb="prolog", job=job_id, uid=2001)
        node.slurm.all[job_id] = job(job_id, batch=False)
    monkeypatch.setattr(service, "SEEN_S", 60.0)
    monkeypatch.setattr(node.daemon.service, "_request_pace", Pace(0.001, 20))

    def codes(job_ids: list[int], caller: Caller = ALICE) -> list[str]:
        result = []
        for job_id in job_ids:
            with pytest.raises(control.RequestError) as caught:
                ask(node, caller, verb="status", job=job_id)
            result.append(caught.value.code)
        return result

    queries: list[int | str] = []
    read_job = node.slurm.job
    monkeypatch.setattr(node.slurm, "job", lambda job_id: (queries.append(job_id), read_job(job_id))[1])
    assert codes([10] * 50) == ["interactive"] * 50
    assert queries == [10]
    assert codes(list(range(10, 35))) == ["interactive"] * 20 + ["too-often"] * 5
    assert queries == list(range(10, 30))
    assert codes([34], ROOT) == ["interactive"]
    assert codes([34]) == ["interactive"]  # cached meanwhile


@pytest.mark.parametrize("held", [True, False])
def test_hold_by_administrator_is_shown(node: Node1, held: bool) -> None:
    """Its owner cannot wake it. In a list, the value is that of the queue; without slurmctld it is unknown."""
    node.acts.asleep.append(asleep(8))
    node.slurm.all[8] = waiting(8, is_held=True, held_by_admin=held)
    row = ask(node, ALICE, verb="status", job=8)["jobs"][0]
    assert (row["held_by_admin"], row["released"], row["restoring_on"]) == (held, False, None)
    wait_until("the queue is read", lambda: ask(node, ALICE, verb="status")["jobs"][0]["held_by_admin"] is held)
    node.daemon.service._slurm_states.clear()
    node.slurm.down = True
    held_by_admin = lambda: ask(node, ALICE, verb="status", job=8)["jobs"][0]["held_by_admin"]  # noqa: E731
    wait_until("the last answer is too old", held_by_admin, lambda known: known is None)


def test_suspended_job_is_shown_beyond_query_limit(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields that only slurmctld knows are missing. A canceled job is no longer suspended."""
    node.acts.asleep += [asleep(8), asleep(9)]
    node.slurm.all[8], node.slurm.all[9] = waiting(8, is_held=True), waiting(9, state="CANCELLED")
    with pytest.raises(control.RequestError, match="job 9 has ended: CANCELLED"):
        ask(node, ALICE, verb="status", job=9)
    monkeypatch.setattr(node.daemon.service, "_request_pace", Pace(0.001, 0))
    assert ask(node, ALICE, verb="status", job=8)["jobs"][0]["held_by_admin"] is None


def test_unresponsive_slurmctld_is_waited_for_once(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later clients only wait briefly until it responds again, and do not queue behind each other."""
    responds, calls = threading.Event(), []
    node.daemon._slurm.post(lambda: responds.wait(30) and None)
    monkeypatch.setattr(daemon, "CALL_S", 0.05)
    node.daemon._slurm_calls(lambda: calls.append(1))
    monkeypatch.setattr(daemon, "CALL_S", 3600.0)
    monkeypatch.setattr(daemon, "NEXT_CALL_S", 0.05)
    for _ in range(3):
        node.daemon._slurm_calls(lambda: calls.append(2))
    responds.set()
    monkeypatch.setattr(daemon, "NEXT_CALL_S", 30.0)
    node.daemon._slurm_calls(lambda: calls.append(3))
    assert calls == [3]
    assert not node.daemon._slurm_calls._timed_out


def test_garbage_starts_few_unmunge_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each apparent credential costs a call of unmunge: an address that sends many is ignored for a while."""
    monkeypatch.setattr(daemon, "listen_address", lambda _: (HOST, 0))
    decoded: list[bytes] = []

    def decode(credential: bytes) -> Message:
        decoded.append(credential)
        raise BadCredentialError("unmunge: Invalid credential")

    monkeypatch.setattr(munge, "decode", decode)
    monkeypatch.setattr(munge, "encode", lambda payload: b"MUNGE:" + b"B" * 40 + b":")
    monkeypatch.setattr(control, "REQUESTS_PER_S", 0.001)
    monkeypatch.setattr(control, "BURST", 5)
    with agent(config_of(tmp_path, agent=f'listen = "{HOST}:9403"')) as node:
        port = node.daemon.control.port
        assert port is not None
        for _ in range(20):
            with socket.create_connection((HOST, port), timeout=60) as sock:
                try:
                    sock.sendall(b"MUNGE:" + b"A" * 40 + b":\n")
                    assert sock.makefile("rb").read() == b""
                except (ConnectionResetError, BrokenPipeError):
                    pass
        assert len(decoded) == 5
        with pytest.raises(UnreachableError, match="closed the connection without a response") as caught:
            ask_node(HOST, port, "c1", {"verb": "status"})
        assert "retry in a moment" in str(caught.value.hint)
