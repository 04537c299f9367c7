"""The agent daemon: it samples, decides and acts."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_stand_ins import (
    Gpus,
    Node1,
    Shepherd,
    Slurm,
    agent,
    ask,
    config_of,
    job,
    waiting,
    watched,
)
from waiting import DEADLINE_S, wait_until

from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.model.suspension import Mode, Refusal, RefusalCode
from slurm_affinode.suspension.records.promises import Promises
from slurm_affinode.suspension.records.record import SuspensionRecord
from slurm_affinode.suspension.slurm_queue import waiting_of

OPTION = "window=1,when=pressure"


def test_idle_job_is_suspended(node: Node1) -> None:
    """It is suspended once, with the reason, after its idle window and one more sample."""
    node.acts.go.set()
    watched(node, option="window=1,when=always")
    wait_until("it is suspended", lambda: node.acts.suspended_jobs)
    assert node.acts.suspended_jobs[0] == (7, "idle 1s")
    assert node.acts.last_samples[0] is None


def test_failed_suspension_delays_the_next_one(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """``status`` shows what failed, and when the next one may be. A suspension that succeeds ends the delay."""
    suspend = node.acts.suspend
    monkeypatch.setattr(
        node.acts, "suspend", lambda *arguments, **named: replace(suspend(*arguments, **named), failure="bad")
    )
    node.acts.go.set()
    watched(node, option="window=1,when=always")
    loop = node.daemon.loop
    decision = wait_until(
        "it is delayed",
        lambda: loop.states[7].decision,
        lambda refusal: refusal is not None and refusal.code == "failed",
    )
    assert decision is not None
    assert "its last suspension failed; the next one may be in " in decision.text
    [row] = ask(node, verb="status", job=7)["jobs"]
    assert row["last"]["text"] == "not suspended, it runs on: bad"
    assert len(node.acts.suspended_jobs) == 1
    monkeypatch.setattr(node.acts, "suspend", suspend)
    loop.states[7].failed_s -= 1e6
    wait_until("it is suspended", lambda: node.acts.suspended_jobs[1:])
    wait_until("the failure is forgotten", lambda: loop.states[7].failures == 0)


def test_suspension_given_up_for_a_job_in_use_delays_no_other(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes again, or a request has arrived: nothing is wrong with its suspension."""
    suspend, given_up = node.acts.suspend, []

    def in_use(*arguments: Any, **named: Any) -> SuspensionRecord:
        record = suspend(*arguments, **named)
        given_up.append(record)
        return replace(record, failure="a request is waiting", in_use=True) if len(given_up) == 1 else record

    monkeypatch.setattr(node.acts, "suspend", in_use)
    node.acts.go.set()
    watched(node, option="window=1,when=always")
    wait_until("it is suspended nevertheless", lambda: given_up[1:])
    assert node.daemon.loop.states[7].failures == 0


def test_agent_leaves_copies_of_images_to_next_one(tmp_path: Path) -> None:
    """It does not wait for them to complete."""
    with agent(config_of(tmp_path)) as node:
        assert not node.acts.stopped.is_set()
    assert node.acts.stopped.is_set()


def test_end_of_idle_window_is_known(node: Node1) -> None:
    """It is sampled at that time; a busy job has no idle window."""
    assert node.daemon.loop.full_s() is None
    watched(node, option="window=3600,when=always")
    state = wait_until(
        "it is idle", lambda: node.daemon.loop.states[7].detector.state, lambda item: item is not None and item.since_s
    )
    assert node.daemon.loop.full_s() == state.since_s + 3600
    node.gpus.util_pct[0] = 12.0
    wait_until("it is busy", lambda: node.daemon.loop.full_s() is None)


def test_busy_job_is_not_suspended(node: Node1) -> None:
    """One signal of one GPU above its limit is sufficient."""
    node.gpus.util_pct[0] = 12.0
    watched(node, option="window=1,when=always")
    row = wait_until(
        "it was seen busy", lambda: ask(node, verb="status", job=7)["jobs"][0], lambda item: bool(item["idle"])
    )
    assert row["idle"]["verdict"] == "busy"
    assert row["next"]["code"] == "busy"
    assert row["idle"]["signals"][0] == {
        "of": "GPU 0", "name": "utilization", "value": 12.0, "limit": 0.0, "verdict": "busy",
    }  # fmt: skip


def test_job_busy_at_last_moment_is_not_suspended(node: Node1) -> None:
    """The result of the sample under the lock is passed to the orchestration."""
    watched(node, option="window=1,when=always")
    assert node.acts.begun.wait(DEADLINE_S)  # the agent's own last sample has been taken
    node.gpus.util_pct[0] = 50.0
    node.acts.go.set()
    samples = wait_until("it looked again", lambda: node.acts.last_samples)
    assert samples[0] == "GPU 0: utilization 50 is above 0"


def test_pending_job_creates_pressure(node: Node1) -> None:
    """slurmctld is queried while the job is idle; the job is suspended as soon as another job waits for its GPU."""
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
    """No action is taken without data; when slurmctld is back, pending actions are taken."""
    node.acts.go.set()
    node.slurm.down = True
    assert Shepherd(node.run_dir, option=OPTION).hello().hear() == "start"
    node.slurm.all[99] = waiting()
    row = wait_until(
        "the agent says what it does not know", lambda: ask(node, verb="status", job=7)["jobs"][0],
        lambda item: item["next"] is not None and item["next"]["against"],
    )  # fmt: skip
    assert {refusal["code"] for refusal in row["next"]["against"]} >= {"queue-unknown", "run-unknown"}
    assert not node.acts.suspended_jobs
    node.slurm.down = False
    with node.daemon.loop._lock:
        node.daemon.loop.states[7].inspected_s = -1e9
    wait_until("it is suspended", lambda: node.acts.suspended_jobs)


def test_driver_lost_and_back(node: Node1) -> None:
    """Unknown is not idle; the window then continues with the new samples."""
    watched(node, option="window=1,when=always")
    node.gpus.missing = True
    wait_until(
        "it is unknown", lambda: ask(node, verb="status", job=7)["jobs"][0]["idle"]["verdict"],
        lambda verdict: verdict == "unknown",
    )  # fmt: skip
    node.gpus.missing = False
    node.acts.go.set()
    wait_until("it is suspended", lambda: node.acts.suspended_jobs)


def test_lost_gpu_makes_job_unknown(node: Node1) -> None:
    """The job is unknown from then on, and the reason is shown."""
    node.gpus.lost.add(0)
    watched(node, option="window=1,when=always")
    row = wait_until(
        "it was sampled", lambda: ask(node, verb="status", job=7)["jobs"][0], lambda item: item["idle"] is not None
    )
    assert row["idle"]["why"] == "GPU 0: GPU 0: GPU is lost"
    assert not node.acts.suspended_jobs


def test_refusals_are_shown_and_respected(node: Node1) -> None:
    """Their codes are shown, and no suspension begins."""
    node.acts.refused.append(Refusal(RefusalCode.SRUN_STEPS, "it runs srun steps"))
    watched(node, option="window=1,when=always")
    row = wait_until(
        "its window is full", lambda: ask(node, verb="status", job=7)["jobs"][0],
        lambda item: item["next"] is not None and item["next"]["code"] == "srun-steps",
    )  # fmt: skip
    assert row["next"]["against"][0] == {"code": "srun-steps", "text": "it runs srun steps"}
    assert not node.acts.suspended_jobs


def test_outdated_refusals_are_discarded(node: Node1) -> None:
    """They are determined again after a suspension or another operation, and old ones are not shown meanwhile."""
    node.acts.refused.append(
        Refusal(RefusalCode.RECOVERING, "an earlier suspension of it is not completed or rolled back yet")
    )
    watched(node, option="window=1,when=always")
    loop = node.daemon.loop
    wait_until("the refusal is known", lambda: 7 in loop.states and loop.states[7].refusals)
    node.daemon._aside.close()  # no more queries
    node.daemon._aside.join()
    loop.restart(7)
    assert loop.states[7].refusals == ()


def test_dry_run_only_reports(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log and the status show the suspension that would begin."""
    with agent(config_of(tmp_path, suspend="dry_run = true")) as node, caplog.at_level("INFO"):
        node.acts.go.set()
        watched(node, option="window=1,when=always")
        wait_until("it is said", lambda: caplog.text, lambda text: "job 7: idle 1s: would be suspended" in text)
        assert ask(node, verb="status", job=7)["dry_run"] is True
        assert not node.acts.suspended_jobs


def test_loop_continues_during_long_suspension(node: Node1) -> None:
    """Other jobs are still sampled regularly."""
    watched(node, option="window=1,when=always")
    wait_until("a suspension begins", lambda: node.daemon.work.under_way().get(7))
    with node.daemon.registry._lock:
        other = replace(node.daemon.registry._jobs[7], job_id=9)
        node.daemon.registry._jobs[9] = other
    reads = node.gpus.reads
    wait_until("the other is sampled", lambda: node.gpus.reads, lambda now: now > reads + 5)
    assert node.daemon.work.under_way() == {7: "suspending"}


def test_suspension_in_place_does_not_wait_for_image_of_another_job(node: Node1) -> None:
    """One job in place is suspended at a time, and frees no GPU; it is independent of suspensions with images."""
    watched(node, option="window=1,when=always")
    wait_until("a suspension begins", lambda: node.daemon.work.under_way().get(7))
    jobs, lock = node.daemon.registry._jobs, node.daemon.registry._lock

    def beside(job_id: int) -> None:
        with lock:
            option = replace(jobs[7].option, mode=Mode.INPLACE)
            jobs[job_id] = replace(jobs[7], job_id=job_id, option=option)

    def code() -> str | None:
        state = node.daemon.loop.states.get(9)
        return None if state is None or state.decision is None else state.decision.code

    beside(8)
    wait_until("one in place begins", lambda: node.daemon.work.under_way().get(8))
    assert node.daemon.work.freeing() == 1
    beside(9)
    wait_until("the other one in place waits", code, lambda result: result == "node-busy")
    assert node.daemon.work.under_way().keys() == {7, 8}


def test_simultaneous_suspensions_are_limited(tmp_path: Path) -> None:
    """No more suspensions begin in one round than the site permits at a time."""
    with agent(config_of(tmp_path, suspend="max_at_once = 2")) as node:
        watched(node, option="window=1,when=always")
        wait_until("a suspension begins", lambda: node.daemon.work.under_way().get(7))
        loop, registry = node.daemon.loop, node.daemon.registry
        with loop._lock, registry._lock:
            for job_id in (8, 9):
                registry._jobs[job_id] = replace(registry._jobs[7], job_id=job_id)
                loop.states[job_id] = replace(loop.states[7], refusals_s=-1e9)
        wait_until("another begins", node.daemon.work.under_way, lambda result: len(result) > 1)
        (last,) = {7, 8, 9} - node.daemon.work.under_way().keys()
        assert loop.states[last].decision.code == "node-busy"


def test_signal_precedes_suspension(node: Node1) -> None:
    """The job has a window of one second, and requests the signal one second before its suspension."""
    node.acts.go.set()
    began = time.monotonic()
    shepherd = watched(node, option="window=1,when=always,signal=USR1@1")
    assert shepherd.hear() == "start"
    assert shepherd.hear() == "signal\nnumber=10"
    assert node.acts.begun.wait(DEADLINE_S)
    assert time.monotonic() - began >= 2


def test_signaled_job_does_not_block_others(node: Node1) -> None:
    """Another job is suspended meanwhile, one at a time; when the first one ends, its turn is released."""
    node.acts.go.set()
    shepherd = watched(node, option="window=1,when=always,signal=USR1@3600")
    wait_until("it was signalled", lambda: node.daemon.work.under_way().get(7) == "signalled")
    with node.daemon.registry._lock:
        first = node.daemon.registry._jobs[7]
        node.daemon.registry._jobs[9] = replace(first, job_id=9, option=replace(first.option, signal=None))
    wait_until("the other is suspended", lambda: {job for job, _ in node.acts.suspended_jobs} == {9})
    assert ask(node, verb="status", job=7)["jobs"][0]["state"] == "signalled"
    shepherd.close()
    wait_until("it is let go", lambda: 7 not in node.daemon.work.under_way())
    assert {job for job, _ in node.acts.suspended_jobs} == {
        9
    }  # the double leaves it there, idle: perhaps more than once


def test_waker_is_called_periodically(node: Node1) -> None:
    wait_until("it was called", lambda: node.acts.ticks, lambda ticks: ticks > 3)


def test_gpus_from_prolog_take_precedence_over_slurmctld(node: Node1) -> None:
    """A job whose GPUs are not known otherwise has those that its processes use."""
    ask(node, verb="prolog", job=7, uid=2001, gpus=[1])
    watched(node)
    assert [device.index for device in node.watched().devices or ()] == [1]


def test_pending_job_promised_by_another_node_creates_no_pressure(tmp_path: Path) -> None:
    """The job on this node continues, its window is kept, and status gives the reason."""
    with agent(config_of(tmp_path)) as node:
        other = Promises(tmp_path, "test", Signer(bytes(32), "c2"), lasts_s=600)
        node.daemon.loop.promises = Promises(tmp_path, "test", Signer(bytes(32), "c1"), lasts_s=600)
        assert other.take(waiting_of(waiting()), 1)
        node.acts.go.set()
        node.slurm.all[99] = waiting()
        watched(node, option=OPTION)
        row = wait_until(
            "its window is full", lambda: ask(node, verb="status", job=7)["jobs"][0],
            lambda item: item["next"] is not None and item["next"]["code"] == "promised",
        )  # fmt: skip
        assert "(99) get GPUs of c2" in row["next"]["text"]
        assert not node.acts.suspended_jobs
        other.leave("test.99.0", 1, freed=False)
        wait_until("it is suspended", lambda: node.acts.suspended_jobs)
        assert node.daemon.loop.promises.known()[0].node == "c1"


@pytest.mark.parametrize(("state", "requeued"), [("COMPLETED", False), ("CANCELLED", False), ("PENDING", True)])
def test_epilog_reports_end_of_job(node: Node1, state: str, requeued: bool) -> None:
    """Images of an ended job are removed; those of a requeued job are kept."""
    shepherd = watched(node)
    shepherd.send("exit\nstatus=0")
    shepherd.close()
    wait_until("it has left", node.daemon.registry.jobs, lambda jobs: not jobs)
    node.slurm.all[7] = job(state=state)
    ask(node, verb="epilog", job=7, uid=2001)
    assert wait_until("the keeper is notified", lambda: node.acts.ended_jobs) == [(7, requeued)]


def test_epilog_reports_nothing_without_slurmctld(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """While slurmctld does not respond, no image is deleted."""
    monkeypatch.setattr("slurm_affinode.agent.service.ENDED_WAIT_S", 0.01)
    monkeypatch.setattr("slurm_affinode.agent.service.ENDED_TRIES", 3)
    shepherd = watched(node)
    shepherd.close()
    node.daemon.service.record_departure(7)
    node.slurm.down = True
    ask(node, verb="epilog", job=7, uid=2001)
    node.daemon.service.ended_jobs.join()  # its query has timed out
    assert node.acts.ended_jobs == []


def test_gpus_are_not_queried_without_job(node: Node1) -> None:
    """A node without such jobs has almost no overhead."""
    wait_until("some ticks have passed", lambda: node.acts.ticks, lambda ticks: ticks > 3)
    assert node.gpus.reads == 0
    assert node.slurm.queries == 0
    assert isinstance(node.gpus, Gpus)
    assert isinstance(node.slurm, Slurm)
