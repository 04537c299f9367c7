"""Whether an idle job is to be suspended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.core.features import may_match
from slurm_affinode.core.idle import IdleState, Verdict
from slurm_affinode.core.policy import (
    Candidate,
    Limit,
    NodeRoom,
    Policy,
    Promise,
    Surroundings,
    Waiting,
    backoff_s,
    decide,
    pressing,
)
from slurm_affinode.core.spans import span
from slurm_affinode.model.suspension import Mode, Pressure, Refusal, SuspendOption


def idle(progress_s: float = 900.0, window_s: float = 900.0, verdict: Verdict = Verdict.IDLE) -> IdleState:
    since = None if verdict is Verdict.BUSY else 0.0
    return IdleState(progress_s, verdict, "GPU 0: utilization 9 is above 0", window_s, since, progress_s, (), None)


JOB = Candidate(
    job_id=100, option=SuspendOption(), idle=idle(), run_s=7200.0, user="alice", account="vision", partition="gpu",
    gpus=1, gpu_kind="h100", cpus=1, memory_mib=500,
)  # fmt: skip
NODE = NodeRoom("c1", ("gpu", "gpu-preempt"), "h100", 0, 6, 12000, ("nvlink",))
WAITING = Waiting(
    131, "131", ("gpu",), "Resources", held=False, priority=10, gpus=1, gpu_kind=None, cpus=1, memory_mib=500
)
PRESSED = Surroundings((WAITING,), NODE)
POLICY = Policy()


def test_idle_job_is_suspended_for_a_job_that_waits() -> None:
    """The decision says what it is based on."""
    decision = decide(POLICY, JOB, PRESSED)
    assert decision.act
    assert decision.text == "idle 15m, 1 job waits for its GPUs (131)"
    assert decision.for_jobs == ("131",)


def test_without_pressure_an_idle_job_stays() -> None:
    """Its GPUs are of no use to anybody else; with when=always that does not matter."""
    quiet = Surroundings((), NODE)
    assert decide(POLICY, JOB, quiet).code == "no-pressure"
    always = replace(JOB, option=SuspendOption(when=Pressure.ALWAYS))
    assert decide(POLICY, always, quiet).act
    assert decide(POLICY, always, Surroundings(None, None)).act


@pytest.mark.parametrize(
    "change",
    [
        {"partitions": ("cpu",)},
        {"reason": "Dependency"},
        {"reason": "JobHeldUser"},
        {"reason": "BeginTime"},
        {"reason": "QOSMaxGRESPerUser"},
        {"reason": None},
        {"held": True},
        {"gpus": 0},
        {"gpus": 3},
        {"gpu_kind": "a100"},
        {"features": "infiniband"},
        {"features": "nvlink&infiniband"},
        {"reservation": "course"},
        {"required_nodes": ("c2",)},
        {"excluded_nodes": ("c1",)},
        {"cpus": 100},
        {"memory_mib": 64000},
        {"job_id": 100},
    ],
)
def test_job_that_could_not_use_the_gpus_is_no_pressure(change: dict[str, object]) -> None:
    """Other partition, kind, features, nodes; held; waiting for something else; itself."""
    waiting = replace(WAITING, **change)  # type: ignore[arg-type]
    assert decide(POLICY, JOB, Surroundings((waiting,), NODE)).code == "no-pressure"


@pytest.mark.parametrize(
    "change",
    [
        {"partitions": ("cpu", "gpu-preempt")},
        {"reason": "Priority"},
        {"gpu_kind": "h100"},
        {"features": "nvlink"},
        {"features": "infiniband|nvlink"},
        {"required_nodes": ("c1", "c9")},
    ],
)
def test_job_that_could_use_the_gpus_is_pressure(change: dict[str, object]) -> None:
    """Any way of asking for what this node has."""
    waiting = replace(WAITING, **change)  # type: ignore[arg-type]
    surroundings = Surroundings((waiting,), NODE)
    assert pressing(surroundings, JOB) == (waiting,)
    assert decide(POLICY, JOB, surroundings).act


def test_job_that_fits_into_free_gpus_presses_nobody() -> None:
    """Slurm starts it by itself; the second one has nothing left and does."""
    free = replace(NODE, free_gpus=1)
    second = replace(WAITING, job_id=132, shown_id="132")
    assert decide(POLICY, JOB, Surroundings((WAITING,), free)).code == "no-pressure"
    assert decide(POLICY, JOB, Surroundings((WAITING, second), free)).for_jobs == ("132",)


def test_job_that_needs_two_idle_jobs_gone() -> None:
    """One idle job alone does not help it; two together do."""
    big = replace(WAITING, gpus=2)
    other = replace(JOB, job_id=101)
    assert pressing(Surroundings((big,), NODE), JOB) == ()
    assert pressing(Surroundings((big,), NODE), JOB, (other,)) == (big,)


def test_pending_job_with_a_promise_presses_nobody_else() -> None:
    """Another node gives it GPUs, or another job of this one does; the next one that waits still presses."""
    for node in ("c2", "c1"):
        promised = replace(PRESSED, promises=(Promise(131, node, 1),))
        decision = decide(POLICY, JOB, promised)
        assert (decision.act, decision.code) == (False, "promised")
        assert decision.text.endswith(f"the jobs that wait for its GPUs (131) get others, of {node}")
        second = replace(WAITING, job_id=132, shown_id="132")
        decision = decide(POLICY, JOB, replace(promised, waiting=(WAITING, second)))
        assert decision.act
        assert [one.job_id for one in decision.presses] == [132]


def test_promise_of_this_node_counts_once_it_covers_the_job() -> None:
    """A job that needs two jobs gone is promised the GPUs of the first, and has to get those of the second."""
    big, free = replace(WAITING, gpus=2), replace(NODE, free_gpus=1)
    part = Surroundings((big,), free, promises=(Promise(131, "c1", 1),))
    assert decide(POLICY, JOB, part).act
    assert decide(POLICY, JOB, replace(part, promises=(Promise(131, "c2", 1),))).code == "promised"
    assert decide(POLICY, JOB, replace(part, promises=(Promise(131, "c1", 2),))).code == "promised"


def test_array_presses_while_it_has_tasks_without_a_promise() -> None:
    """One record of the queue stands for several tasks."""
    array = replace(WAITING, tasks=2)
    one = Surroundings((array,), NODE, promises=(Promise(131, "c2", 1),))
    assert decide(POLICY, JOB, one).act
    both = (Promise(131, "c2", 1), Promise(131, "c3", 1))
    assert decide(POLICY, JOB, replace(one, promises=both)).code == "promised"


def test_node_that_takes_no_jobs_has_no_pressure() -> None:
    """A drained node would not give its GPUs to anybody."""
    assert decide(POLICY, JOB, Surroundings((WAITING,), replace(NODE, available=False))).code == "no-pressure"


def test_unknown_queue_is_not_pressure() -> None:
    """slurmctld is away: nothing is done."""
    assert decide(POLICY, JOB, Surroundings(None, NODE)).code == "queue-unknown"


def test_what_happens_next_is_said_before_the_window_is_full() -> None:
    """What status shows: how long it takes, and what then."""
    decision = decide(POLICY, replace(JOB, idle=idle(660)), PRESSED)
    assert (decision.act, decision.code) == (False, "window")
    assert (
        decision.text == "idle for 11m; after 4m more; then it is suspended: idle 15m, 1 job waits for its GPUs (131)"
    )
    assert "then nothing" in decide(POLICY, replace(JOB, idle=idle(660)), Surroundings((), NODE)).text
    decision = decide(POLICY, replace(JOB, idle=None), PRESSED)
    assert (decision.code, decision.text) == (
        "unknown",
        "it was not looked at yet; after 15m of idleness; "
        "then it is suspended: idle 15m, 1 job waits for its GPUs (131)",
    )
    assert decide(POLICY, replace(JOB, idle=idle(verdict=Verdict.BUSY)), PRESSED).code == "busy"
    assert decide(POLICY, replace(JOB, idle=idle(verdict=Verdict.UNKNOWN)), PRESSED).code == "unknown"


def test_every_reason_against_is_given() -> None:
    """A user sees all that keeps his job, not one after the other."""
    policy = Policy(users={"alice": Limit(exclude=True)}, min_run_s=9000)
    refusal = Refusal("srun-steps", "it has srun steps")
    decision = decide(policy, replace(JOB, refusals=(refusal,)), replace(PRESSED, no_room="the store is full"))
    assert [one.code for one in decision.against] == ["srun-steps", "excluded-user", "min-run", "no-room"]
    assert not decision.act


@pytest.mark.parametrize(
    ("policy", "surroundings", "code"),
    [
        (Policy(partitions={"gpu": Limit(exclude=True)}), PRESSED, "excluded-partition"),
        (Policy(accounts={"vision": Limit(exclude=True)}), PRESSED, "excluded-account"),
        (Policy(users={"alice": Limit(exclude=True)}), PRESSED, "excluded-user"),
        (Policy(min_run_s=7201), PRESSED, "min-run"),
        (Policy(partitions={"gpu": Limit(min_run_s=7201)}), PRESSED, "min-run"),
        (Policy(), replace(PRESSED, under_way=1), "node-busy"),
        (Policy(), replace(PRESSED, no_room="full"), "no-room"),
        (Policy(users={"alice": Limit(2)}), replace(PRESSED, suspended_users={"alice": 2}), "limit-user"),
        (Policy(accounts={"vision": Limit(2)}), replace(PRESSED, suspended_accounts={"vision": 3}), "limit-account"),
        (Policy(partitions={"gpu": Limit(0)}), PRESSED, "limit-partition"),
        (Policy(dry_run=True), PRESSED, "dry-run"),
    ],
)
def test_rules_of_the_site(policy: Policy, surroundings: Surroundings, code: str) -> None:
    """Each rule stops a suspension under its own name."""
    decision = decide(policy, JOB, surroundings)
    assert not decision.act
    assert decision.code == code


def test_one_more_counts_for_every_limit_that_is_its() -> None:
    """What is decided in one round is known to the next decision of it."""
    policy = Policy(
        max_at_once=9, users={"alice": Limit(1)}, accounts={"vision": Limit(2)}, partitions={"gpu": Limit(3)}
    )
    one = PRESSED.with_one_more(JOB)
    assert decide(policy, JOB, PRESSED).act
    assert [two.code for two in decide(policy, JOB, one).against] == ["limit-user"]
    codes = [two.code for two in decide(policy, JOB, one.with_one_more(JOB).with_one_more(JOB)).against]
    assert codes == ["limit-partition", "limit-account", "limit-user"]
    in_place = PRESSED.with_one_more(replace(JOB, option=replace(JOB.option, mode=Mode.INPLACE)))
    assert (in_place.under_way, in_place.in_place_under_way) == (0, 1)
    assert decide(Policy(), JOB, in_place).act


def test_rules_about_others_do_not_matter() -> None:
    """Limits of other users, accounts and partitions, and limits that are not reached."""
    policy = Policy(
        users={"bob": Limit(exclude=True), "alice": Limit(2)},
        accounts={"language": Limit(0)},
        partitions={"cpu": Limit(exclude=True)},
    )
    assert decide(policy, JOB, replace(PRESSED, suspended_users={"alice": 1, "bob": 9})).act


def test_unknown_run_time_is_not_long_enough() -> None:
    """A job of which slurmctld has said nothing yet is left alone."""
    assert decide(POLICY, replace(JOB, run_s=None), PRESSED).code == "run-unknown"


def test_job_that_idles_again_and_again_is_left_alone_longer_each_time() -> None:
    """Five minutes, ten, twenty, up to six hours."""
    assert [backoff_s(POLICY, n) for n in (0, 1, 2, 3)] == [0, 300, 600, 1200]
    assert backoff_s(POLICY, 10_000) == 21600
    assert decide(POLICY, replace(JOB, run_s=1000.0, suspensions=3), PRESSED).code == "backoff"
    assert decide(POLICY, replace(JOB, run_s=1200.0, suspensions=3), PRESSED).act


def test_job_that_is_being_worked_on_is_left_alone() -> None:
    """No second suspension of the same job."""
    assert decide(POLICY, replace(JOB, busy_with="suspending"), PRESSED).code == "under-way"


def test_dry_run_says_what_it_would_do() -> None:
    """And does nothing."""
    decision = decide(Policy(dry_run=True), JOB, PRESSED)
    assert not decision.act
    assert "would be suspended" in decision.text


@pytest.mark.parametrize(
    ("constraint", "match"),
    [
        (None, True), ("", True), ("a", True), ("z", False), ("a&b", True), ("a&z", False), ("z|b", True),
        ("(a|z)&b", True), ("(z|y)&b", False), ("a,b", True), ("[z|a]", True), ("[z|y]", False), ("a*4", True),
        ("z*4&y*2", False), ("(a", False), ("&", False), ("a b", False),
    ],
)  # fmt: skip
def test_constraints(constraint: str | None, match: bool) -> None:
    """As sbatch --constraint writes them; what cannot be read does not match."""
    assert may_match(constraint, ("a", "b")) is match


@given(st.text(max_size=30))
def test_no_constraint_breaks_anything(constraint: str) -> None:
    """Users write them."""
    assert may_match(constraint, ("a",)) in (True, False)


def test_a_constraint_of_a_thousand_brackets_does_not_match() -> None:
    """It keeps no agent from deciding about all the others."""
    assert may_match("(a)", ("a",))
    assert not may_match("(" * 3000 + "a" + ")" * 3000, ("a",))


@given(
    window=st.floats(1, 3600), progress=st.floats(0, 7200), run=st.one_of(st.none(), st.floats(0, 1e6)),
    verdict=st.sampled_from(Verdict), dry=st.booleans(), room=st.one_of(st.none(), st.just("full")),
    queue=st.booleans(), under_way=st.integers(0, 2), suspensions=st.integers(0, 5),
)  # fmt: skip
def test_nothing_is_done_against_a_rule(  # noqa: PLR0917
    window: float, progress: float, run: float | None, verdict: Verdict, dry: bool, room: str | None, queue: bool,
    under_way: int, suspensions: int,
) -> None:  # fmt: skip
    """Acting means: idle for the whole window, known run time, a job that waits, room, and no dry run."""
    candidate = replace(JOB, idle=idle(progress, window, verdict), run_s=run, suspensions=suspensions)
    surroundings = Surroundings((WAITING,) if queue else None, NODE, under_way, no_room=room)
    decision = decide(Policy(dry_run=dry), candidate, surroundings)
    assert decision.text
    if decision.act:
        assert verdict is Verdict.IDLE
        assert progress >= window
        assert run is not None
        assert run >= 300
        assert not dry
        assert room is None
        assert queue
        assert under_way == 0
        assert not decision.against


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (60, "1m"),
        (90, "1m 30s"),
        (900, "15m"),
        (7500, "2h 5m"),
        (86400 * 3 + 14400, "3d 4h"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    """For people: the two largest units."""
    assert span(seconds) == text
