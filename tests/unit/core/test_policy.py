"""Decision whether an idle job is suspended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base.text import span
from slurm_affinode.core.features import may_match
from slurm_affinode.core.idle import IdleState, Verdict
from slurm_affinode.core.policy import (
    Candidate,
    Limit,
    NodeRoom,
    Promise,
    Surroundings,
    SuspendPolicy,
    Waiting,
    backoff_s,
    decide,
    pressing,
)
from slurm_affinode.model.suspension import Mode, Pressure, Refusal, RefusalCode, SuspendOption


def idle(progress_s: float = 900.0, window_s: float = 900.0, verdict: Verdict = Verdict.IDLE) -> IdleState:
    since = None if verdict is Verdict.BUSY else 0.0
    return IdleState(progress_s, verdict, "GPU 0: utilization 9 is above 0", window_s, since, progress_s, (), None)


JOB = Candidate(
    job_id=100, option=SuspendOption(), idle=idle(), run_s=7200.0, user="alice", account="vision", partition="gpu",
    gpus=1, gpu_kind="h100", cpus=1, memory_mib=500,
)  # fmt: skip
NODE = NodeRoom("c1", ("gpu", "gpu-preempt"), "h100", 0, 6, 12000, ("nvlink",))
WAITING = Waiting(
    131, "131", ("gpu",), "Resources", is_held=False, priority=10, gpus=1, gpu_kind=None, cpus=1, memory_mib=500
)
PRESSED = Surroundings((WAITING,), NODE)
POLICY = SuspendPolicy()


def test_idle_job_is_suspended_for_a_pending_job() -> None:
    """The decision has its reasons."""
    decision = decide(POLICY, JOB, PRESSED)
    assert decision.act
    assert decision.text == "idle 15m, 1 job waits for its GPUs (131)"
    assert decision.for_jobs == ("131",)


def test_reason_names_three_jobs_and_the_idle_time() -> None:
    """The idle time is at least the window; before the first sample it is that."""
    several = tuple(replace(WAITING, job_id=131 + n, shown_id=str(131 + n)) for n in range(4))
    node = replace(NODE, free_cpus=60)
    three = decide(POLICY, replace(JOB, idle=idle(1800.0)), Surroundings(several[:3], node))
    assert three.text == "idle 30m, 3 jobs wait for its GPUs (131, 132, 133)"
    four = decide(POLICY, JOB, Surroundings(several, node))
    assert four.text == "idle 15m, 4 jobs wait for its GPUs (131, 132, 133, ...)"
    unsampled = decide(POLICY, replace(JOB, idle=None), PRESSED)
    assert (unsampled.act, unsampled.code) == (False, "unknown")
    assert "idle 15m" in unsampled.text


def test_idle_job_without_pressure_is_not_suspended() -> None:
    """No other job could use its GPUs; with when=always that does not matter."""
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
        {"is_held": True},
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
def test_job_that_could_not_use_the_gpus_causes_no_pressure(change: dict[str, object]) -> None:
    """Other partition, GPU type, features or nodes; held; waiting for another reason; the job itself."""
    waiting = replace(WAITING, **change)  # type: ignore[arg-type]
    assert decide(POLICY, JOB, Surroundings((waiting,), NODE)).code == "no-pressure"


def test_job_without_gpus_causes_no_pressure_on_a_full_node() -> None:
    """It waits for CPUs, which a suspension does not serve."""
    full = replace(NODE, free_cpus=0)
    assert pressing(Surroundings((replace(WAITING, gpus=0),), full), JOB) == ()
    assert pressing(Surroundings((WAITING,), full), JOB) == (WAITING,)


@pytest.mark.parametrize("free", [(5, 11500), (6, 11499)])
def test_job_that_needs_all_that_is_freed_is_pressure(free: tuple[int, int]) -> None:
    """CPUs and memory exactly suffice; one less does not."""
    needs = replace(WAITING, cpus=6, memory_mib=12000)
    enough = replace(NODE, free_cpus=5, free_memory_mib=11500)
    assert pressing(Surroundings((needs,), enough), JOB) == (needs,)
    short = replace(NODE, free_cpus=free[0] - (free[1] == 11500), free_memory_mib=free[1])
    assert pressing(Surroundings((needs,), short), JOB) == ()


@pytest.mark.parametrize(("requested", "node_kind", "fits"), [
    ("a100+h100", "h100", True), ("h100", "a100+h100", True), ("a100+l4", "h100+t4", False), (None, "h100", True),
    ("a100", None, True),
])  # fmt: skip
def test_one_of_several_gpu_types_is_enough(requested: str | None, node_kind: str | None, fits: bool) -> None:
    """A type that is unknown is not ruled out."""
    surroundings = Surroundings((replace(WAITING, gpu_kind=requested),), replace(NODE, gpu_kind=node_kind))
    assert bool(pressing(surroundings, JOB)) is fits


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
    """Its requests match the node in various ways."""
    waiting = replace(WAITING, **change)  # type: ignore[arg-type]
    surroundings = Surroundings((waiting,), NODE)
    assert pressing(surroundings, JOB) == (waiting,)
    assert decide(POLICY, JOB, surroundings).act


def test_job_that_fits_into_free_gpus_causes_no_pressure() -> None:
    """Slurm starts it anyway; a second one no longer fits, and is."""
    free = replace(NODE, free_gpus=1)
    second = replace(WAITING, job_id=132, shown_id="132")
    assert decide(POLICY, JOB, Surroundings((WAITING,), free)).code == "no-pressure"
    assert decide(POLICY, JOB, Surroundings((WAITING, second), free)).for_jobs == ("132",)


def test_job_that_needs_the_gpus_of_two_idle_jobs() -> None:
    """One idle job is not enough for it; two are."""
    big = replace(WAITING, gpus=2)
    other = replace(JOB, job_id=101)
    assert pressing(Surroundings((big,), NODE), JOB) == ()
    assert pressing(Surroundings((big,), NODE), JOB, (other,)) == (big,)


def test_pending_job_with_a_promise_causes_no_pressure() -> None:
    """Another node, or another job on this one, gives it GPUs; the next pending job still counts."""
    for node in ("c2", "c1"):
        promised = replace(PRESSED, promises=(Promise(131, node, 1),))
        decision = decide(POLICY, JOB, promised)
        assert (decision.act, decision.code) == (False, "promised")
        assert decision.text.endswith(f"the jobs that wait for its GPUs (131) get GPUs of {node}")
        second = replace(WAITING, job_id=132, shown_id="132")
        decision = decide(POLICY, JOB, replace(promised, waiting=(WAITING, second)))
        assert decision.act
        assert [item.job_id for item in decision.presses] == [132]


def test_promise_of_this_node_counts_if_it_covers_the_job() -> None:
    """A job that needs the GPUs of two jobs is promised those of the first, and must get those of the second."""
    big, free = replace(WAITING, gpus=2), replace(NODE, free_gpus=1)
    part = Surroundings((big,), free, promises=(Promise(131, "c1", 1),))
    assert decide(POLICY, JOB, part).act
    assert decide(POLICY, JOB, replace(part, promises=(Promise(131, "c2", 1),))).code == "promised"
    assert decide(POLICY, JOB, replace(part, promises=(Promise(131, "c1", 2),))).code == "promised"


def test_array_is_pressure_while_tasks_have_no_promise() -> None:
    """One record of the queue stands for several tasks."""
    array = replace(WAITING, tasks=2)
    surroundings = Surroundings((array,), NODE, promises=(Promise(131, "c2", 1),))
    assert decide(POLICY, JOB, surroundings).act
    both = (Promise(131, "c2", 1), Promise(131, "c3", 1))
    assert decide(POLICY, JOB, replace(surroundings, promises=both)).code == "promised"


def test_unavailable_node_has_no_pressure() -> None:
    """A drained node would not give its GPUs to another job."""
    assert decide(POLICY, JOB, Surroundings((WAITING,), replace(NODE, available=False))).code == "no-pressure"


def test_unknown_queue_is_not_pressure() -> None:
    """slurmctld does not respond: nothing is done."""
    assert decide(POLICY, JOB, Surroundings(None, NODE)).code == "queue-unknown"


def test_next_step_is_reported_before_the_window_is_full() -> None:
    """``status`` shows how long it takes and what follows."""
    decision = decide(POLICY, replace(JOB, idle=idle(660)), PRESSED)
    assert (decision.act, decision.code) == (False, "window")
    assert (
        decision.text == "idle for 11m; after 4m more; then it is suspended: idle 15m, 1 job waits for its GPUs (131)"
    )
    assert "then nothing" in decide(POLICY, replace(JOB, idle=idle(660)), Surroundings((), NODE)).text
    decision = decide(POLICY, replace(JOB, idle=None), PRESSED)
    assert (decision.code, decision.text) == (
        "unknown",
        "it has not been sampled yet; after 15m of idleness; "
        "then it is suspended: idle 15m, 1 job waits for its GPUs (131)",
    )
    assert decide(POLICY, replace(JOB, idle=idle(verdict=Verdict.BUSY)), PRESSED).code == "busy"
    assert decide(POLICY, replace(JOB, idle=idle(verdict=Verdict.UNKNOWN)), PRESSED).code == "unknown"


def test_all_reasons_against_are_reported() -> None:
    """The user sees them together, not one after the other."""
    policy = SuspendPolicy(users={"alice": Limit(exclude=True)}, min_run_s=9000)
    refusal = Refusal(RefusalCode.SRUN_STEPS, "it has srun steps")
    decision = decide(policy, replace(JOB, refusals=(refusal,)), replace(PRESSED, no_room="the store is full"))
    assert [item.code for item in decision.against] == ["srun-steps", "excluded-user", "min-run", "no-room"]
    assert not decision.act


@pytest.mark.parametrize(
    ("policy", "surroundings", "code"),
    [
        (SuspendPolicy(partitions={"gpu": Limit(exclude=True)}), PRESSED, "excluded-partition"),
        (SuspendPolicy(accounts={"vision": Limit(exclude=True)}), PRESSED, "excluded-account"),
        (SuspendPolicy(users={"alice": Limit(exclude=True)}), PRESSED, "excluded-user"),
        (SuspendPolicy(min_run_s=7201), PRESSED, "min-run"),
        (SuspendPolicy(partitions={"gpu": Limit(min_run_s=7201)}), PRESSED, "min-run"),
        (SuspendPolicy(), replace(PRESSED, under_way=1), "node-busy"),
        (SuspendPolicy(), replace(PRESSED, no_room="full"), "no-room"),
        (SuspendPolicy(users={"alice": Limit(2)}), replace(PRESSED, suspended_users={"alice": 2}), "limit-user"),
        (
            SuspendPolicy(accounts={"vision": Limit(2)}),
            replace(PRESSED, suspended_accounts={"vision": 3}),
            "limit-account",
        ),
        (SuspendPolicy(partitions={"gpu": Limit(0)}), PRESSED, "limit-partition"),
        (SuspendPolicy(users={"alice": Limit(9)}), replace(PRESSED, suspended_known=False), "limit-unknown"),
        (SuspendPolicy(dry_run=True), PRESSED, "dry-run"),
    ],
)
def test_site_rules_prevent_a_suspension(policy: SuspendPolicy, surroundings: Surroundings, code: str) -> None:
    """Each rule is reported under its own code."""
    decision = decide(policy, JOB, surroundings)
    assert not decision.act
    assert decision.code == code


def test_additional_suspension_counts_for_all_its_limits() -> None:
    """Decisions of one round are known to the next decision of that round."""
    policy = SuspendPolicy(
        max_at_once=9, users={"alice": Limit(1)}, accounts={"vision": Limit(2)}, partitions={"gpu": Limit(3)}
    )
    item = PRESSED.with_one_more(JOB)
    assert decide(policy, JOB, PRESSED).act
    assert [two.code for two in decide(policy, JOB, item).against] == ["limit-user"]
    codes = [two.code for two in decide(policy, JOB, item.with_one_more(JOB).with_one_more(JOB)).against]
    assert codes == ["limit-partition", "limit-account", "limit-user"]
    assert (item.under_way, item.with_one_more(JOB).under_way) == (1, 2)
    assert decide(replace(policy, users={}, max_at_once=1), JOB, item).code == "node-busy"
    unknown = PRESSED.with_one_more(replace(JOB, user=None, account=None, partition=None))
    assert (unknown.suspended_users, unknown.suspended_accounts, unknown.suspended_partitions) == ({}, {}, {})
    in_place = PRESSED.with_one_more(replace(JOB, option=replace(JOB.option, mode=Mode.INPLACE)))
    assert (in_place.under_way, in_place.in_place_under_way) == (0, 1)
    assert decide(SuspendPolicy(), JOB, in_place).act


def test_rules_of_others_do_not_apply() -> None:
    """Limits of other users, accounts and partitions, and limits that are not reached."""
    policy = SuspendPolicy(
        users={"bob": Limit(exclude=True), "alice": Limit(2)},
        accounts={"language": Limit(0)},
        partitions={"cpu": Limit(exclude=True)},
    )
    assert decide(policy, JOB, replace(PRESSED, suspended_users={"alice": 1, "bob": 9})).act


def test_unknown_run_time_prevents_a_suspension() -> None:
    """slurmctld has not reported the job yet. Exactly the shortest run time is enough."""
    assert decide(POLICY, replace(JOB, run_s=None), PRESSED).code == "run-unknown"
    least = replace(POLICY, min_run_s=600.0)
    assert decide(least, replace(JOB, run_s=599.0), PRESSED).code == "min-run"
    assert decide(least, replace(JOB, run_s=600.0), PRESSED).act


def test_backoff_grows_with_each_suspension() -> None:
    """It is five minutes, ten, twenty, up to six hours."""
    assert [backoff_s(POLICY, n) for n in (0, 1, 2, 3)] == [0, 300, 600, 1200]
    assert backoff_s(POLICY, 10_000) == 21600
    assert decide(POLICY, replace(JOB, run_s=1000.0, suspensions=3), PRESSED).code == "backoff"
    assert decide(POLICY, replace(JOB, run_s=1200.0, suspensions=3), PRESSED).act


def test_failed_suspension_is_retried_with_growing_backoff() -> None:
    """What no check predicts would fail again with every idle window, each time after its GPU memory has moved."""
    failed = replace(JOB, failures=2, failed_s=599.0)
    decision = decide(POLICY, failed, PRESSED)
    assert decision.code == "failed"
    assert decision.text.endswith("its last 2 suspensions failed; the next one may be in 1s")
    assert decide(POLICY, replace(failed, failed_s=600.0), PRESSED).act
    assert decide(POLICY, replace(failed, failures=0), PRESSED).act


def test_job_that_is_woken_at_once_stays_awake() -> None:
    """Longer after each short sleep, unless another job waits for its GPU memory."""
    woken = replace(JOB, short_sleeps=2, awake_s=599.0)
    decision = decide(POLICY, woken, PRESSED)
    assert decision.code == "short-sleeps"
    assert "its last 2 sleeps were shorter than" in decision.text
    first = decide(POLICY, replace(woken, short_sleeps=1, awake_s=0.0), PRESSED)
    assert "its last sleep was shorter than" in first.text
    assert decide(POLICY, replace(woken, awake_s=600.0), PRESSED).act
    assert decide(POLICY, replace(woken, needed_by=("8",)), PRESSED).act


def test_job_under_way_is_not_suspended_again() -> None:
    assert decide(POLICY, replace(JOB, busy_with="suspending"), PRESSED).code == "under-way"


def test_dry_run_reports_the_planned_suspension() -> None:
    decision = decide(SuspendPolicy(dry_run=True), JOB, PRESSED)
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
def test_constraint_matches_features(constraint: str | None, match: bool) -> None:
    """The syntax is that of sbatch --constraint; an invalid constraint does not match."""
    assert may_match(constraint, ("a", "b")) is match


@given(st.text(max_size=30))
def test_any_constraint_is_evaluated_without_an_error(constraint: str) -> None:
    """Users write them."""
    assert may_match(constraint, ("a",)) in (True, False)


def test_deeply_nested_constraint_does_not_match() -> None:
    """The agent must still decide about all other jobs."""
    assert may_match("(a)", ("a",))
    assert not may_match("(" * 3000 + "a" + ")" * 3000, ("a",))


@given(
    window=st.floats(1, 3600), progress=st.floats(0, 7200), run=st.one_of(st.none(), st.floats(0, 1e6)),
    verdict=st.sampled_from(Verdict), dry=st.booleans(), room=st.one_of(st.none(), st.just("full")),
    queue=st.booleans(), under_way=st.integers(0, 2), suspensions=st.integers(0, 5),
)  # fmt: skip
def test_suspension_requires_all_conditions(  # noqa: PLR0917
    window: float, progress: float, run: float | None, verdict: Verdict, dry: bool, room: str | None, queue: bool,
    under_way: int, suspensions: int,
) -> None:  # fmt: skip
    """They are an idle window, a known run time, a pending job, room, and no dry run."""
    candidate = replace(JOB, idle=idle(progress, window, verdict), run_s=run, suspensions=suspensions)
    surroundings = Surroundings((WAITING,) if queue else None, NODE, under_way, no_room=room)
    decision = decide(SuspendPolicy(dry_run=dry), candidate, surroundings)
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
        (0, "0s"),
        (59.4, "59s"),
        (60, "1m"),
        (90, "1m 30s"),
        (900, "15m"),
        (7500, "2h 5m"),
        (86400 * 3 + 14400, "3d 4h"),
    ],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert span(seconds) == text
