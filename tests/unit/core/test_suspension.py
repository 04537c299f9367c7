"""Recovery after a crash: no job is lost or duplicated."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_affinode.core.suspension import IN_PLACE, JobFact, RecoveryAction, World, pair_gpus, recover
from slurm_affinode.model.suspension import GpuFact, Phase, Refusal


@dataclass(frozen=True)
class Job:
    """The true state of a job, independent of any journal."""

    tree: str = "running"
    """``running``, ``held`` (locked, moved out of GPU memory, or stopped), ``gone``."""
    image: bool = False
    """Complete, and identical to the process tree."""
    slurm: str = "running"
    """``running`` (the suspended attempt), ``queued``."""
    copies: int = 0
    """Number of times it was started afresh without its image, or resumed beside its image: must stay 0."""


@dataclass
class Machine:
    """The effects of a suspension in order; any of them may be the last before the crash."""

    job: Job
    budget: int

    def effect(self, **changes: object) -> None:
        """Apply one effect."""
        if self.budget == 0:
            raise KeyboardInterrupt
        self.budget -= 1
        self.job = replace(self.job, **changes)


def suspend(machine: Machine, journal: list[Phase]) -> None:
    """Suspend as the agent does: the journal entry first, then the effect."""
    for phase, changes in (
        (Phase.LOCKING, {"tree": "held"}),
        (Phase.LOCKED, {}),
        (Phase.PARKED, {}),
        (Phase.DUMPING, {"image": True}),
        (Phase.DUMPED, {}),
        (Phase.REQUEUEING, {"slurm": "queued"}),
        (Phase.REQUEUEING, {"tree": "gone"}),
        (Phase.QUEUED, {}),
    ):
        machine.effect()
        journal.append(phase)
        machine.effect(**changes)


def facts(machine: Machine, slurm_answers: bool) -> World:
    """Return the state as recovery sees it."""
    job = machine.job
    fact = JobFact.QUEUED if job.slurm == "queued" else JobFact.THIS_RUN
    return World(fact if slurm_answers else JobFact.UNKNOWN, job.tree != "gone", job.image)


def act(machine: Machine, action: RecoveryAction) -> None:
    """Perform one action of recovery."""
    match action:
        case RecoveryAction.RESUME:
            assert not machine.job.image, "an image that can be found is older than the tree that continues"
            machine.effect(tree="running")
        case RecoveryAction.DROP_IMAGE:
            assert machine.job.tree != "gone" or not machine.job.image, "the only copy of the job was removed"
            machine.effect(image=False)
        case RecoveryAction.REQUEUE:
            assert machine.job.image
            machine.effect(slurm="queued")
        case RecoveryAction.KILL_TREE:
            assert machine.job.image
            machine.effect(tree="gone")
        case (
            RecoveryAction.WAIT
            | RecoveryAction.CLOSE
            | RecoveryAction.LOST
            | RecoveryAction.RESTORE
            | RecoveryAction.SLEEP
            | RecoveryAction.WAKE
        ):
            pass


@given(
    steps=st.lists(st.integers(0, 18), min_size=1, max_size=6),
    answers=st.lists(st.booleans(), min_size=6, max_size=6),
)
@example(steps=[9, 1, 1], answers=[True, False, False, False, False, False])
def test_crash_ends_in_a_running_job_or_a_complete_image(steps: list[int], answers: list[bool]) -> None:
    """The agent dies after any number of effects, and again during recovery, whether slurmctld responds or not."""
    machine, journal = Machine(Job(), steps[0]), [Phase.RUNNING]
    with contextlib.suppress(KeyboardInterrupt):
        suspend(machine, journal)
    over = False
    for budget, answered in [*zip(steps[1:], answers, strict=False), *[(99, True)] * 4]:
        machine.budget = budget
        with contextlib.suppress(KeyboardInterrupt):
            over = over or recovered(machine, journal, answered)
    job = machine.job
    if job.slurm == "queued":
        assert (job.tree, job.image) == ("gone", True)
    else:
        assert (job.tree, job.image) == ("running", False)


def recovered(machine: Machine, journal: list[Phase], answered: bool) -> bool:
    """Run recovery once, as the agent does when it starts; return whether the suspension is over."""
    if journal[-1] is Phase.RUNNING:
        return True
    result = recover(journal[-1], facts(machine, answered))
    for action in result.actions:
        act(machine, action)
    machine.effect()
    if result.phase is None:
        journal.append(Phase.RUNNING)
        return True
    journal.append(result.phase)
    return False


@given(phase=st.sampled_from(Phase), tree=st.booleans(), image=st.booleans(), job=st.sampled_from(JobFact))
def test_recovery_is_safe_in_any_state(phase: Phase, tree: bool, image: bool, job: JobFact) -> None:
    """No process tree is killed without an image, and the only copy of a live job is never removed."""
    result = recover(phase, World(job, tree, image))
    over = job is JobFact.ENDED
    if RecoveryAction.KILL_TREE in result.actions:
        assert over or image
    if RecoveryAction.DROP_IMAGE in result.actions and not over:
        assert tree or not image or phase not in (Phase.DUMPED, Phase.REQUEUEING, Phase.QUEUED, Phase.RESTORING)
    if RecoveryAction.RESUME in result.actions:
        assert tree
        assert not image or result.actions.index(RecoveryAction.DROP_IMAGE) < result.actions.index(
            RecoveryAction.RESUME
        )
    if RecoveryAction.REQUEUE in result.actions:
        assert image
        assert job is JobFact.THIS_RUN
    assert bool({RecoveryAction.CLOSE, RecoveryAction.LOST} & set(result.actions)) == (result.phase is None)
    if RecoveryAction.LOST in result.actions:
        assert not tree
        assert not over


@given(
    steps=st.lists(st.integers(0, 9), min_size=1, max_size=6), answers=st.lists(st.booleans(), min_size=6, max_size=6)
)
def test_crash_in_place_ends_in_a_running_or_suspended_job(steps: list[int], answers: list[bool]) -> None:
    """The agent dies after any number of effects, also during recovery: no tree is killed or forgotten."""
    machine, journal = Machine(Job(), steps[0]), [Phase.RUNNING]
    with contextlib.suppress(KeyboardInterrupt):
        for phase, changes in (
            (Phase.LOCKING, {"tree": "held"}),
            (Phase.LOCKED, {}),
            (Phase.PARKED, {}),
            (Phase.FROZEN, {}),
            (Phase.WAKING, {"tree": "running"}),
            (Phase.RUNNING, {}),
        ):
            machine.effect()
            journal.append(phase)
            machine.effect(**changes)
    for budget, answered in [*zip(steps[1:], answers, strict=False), (99, True), (99, True)]:
        machine.budget = budget
        with contextlib.suppress(KeyboardInterrupt):
            if journal[-1] is Phase.RUNNING:
                break
            world = replace(facts(machine, answered), in_place=True)
            result = recover(journal[-1], world)
            assert not {
                RecoveryAction.KILL_TREE,
                RecoveryAction.REQUEUE,
                RecoveryAction.RESTORE,
                RecoveryAction.WAIT,
            } & set(result.actions)
            for action in result.actions:
                if action is RecoveryAction.WAKE:
                    machine.effect()
                    journal.append(Phase.WAKING)
                    machine.effect(tree="running")
                elif action is RecoveryAction.SLEEP:
                    machine.effect(tree="held")
                else:
                    act(machine, action)
            if result.phase is not Phase.FROZEN:
                machine.effect()
                journal.append(Phase.RUNNING)
    assert (machine.job.tree, machine.job.copies, machine.job.image) in (("running", 0, False), ("held", 0, False))
    assert (machine.job.tree == "running") == (journal[-1] is not Phase.FROZEN)


def test_job_suspended_in_place_and_requeued_is_resumed() -> None:
    """Slurm ends its processes, which must receive the signals."""
    for phase in (Phase.FROZEN, Phase.WAKING):
        for job in (JobFact.QUEUED, JobFact.LATER_RUN):
            recovery = recover(phase, World(job, tree=True, image=False, in_place=True))
            assert (recovery.actions, recovery.phase) == ((RecoveryAction.WAKE,), Phase.WAKING)
        assert recover(phase, World(JobFact.ENDED, tree=True, image=False, in_place=True)).phase is None


def test_processes_lost_with_their_node_are_reported_when_slurm_responds() -> None:
    """Without an image nothing else can be done; an ended job needs no report."""
    for phase in (Phase.LOCKING, Phase.LOCKED, Phase.PARKED, Phase.FROZEN, Phase.WAKING):
        for in_place in (True, False) if phase not in IN_PLACE else (True,):

            def actions(job: JobFact, phase: Phase = phase, in_place: bool = in_place) -> tuple[RecoveryAction, ...]:
                return recover(phase, World(job, tree=False, image=False, in_place=in_place)).actions

            assert actions(JobFact.UNKNOWN) == (RecoveryAction.WAIT,)
            for job in (JobFact.THIS_RUN, JobFact.QUEUED, JobFact.LATER_RUN):
                assert actions(job)[-1] is RecoveryAction.LOST
            assert actions(JobFact.ENDED)[-1] is RecoveryAction.CLOSE


def test_tree_stays_stopped_if_slurm_does_not_respond_to_a_requeue() -> None:
    """It may have accepted the request: a resumed tree would run beside its image."""
    result = recover(Phase.REQUEUEING, World(JobFact.UNKNOWN, tree=True, image=True))
    assert result.actions == (RecoveryAction.WAIT,)


A, B, C, D = (GpuFact(f"GPU-{name}", "H100", 80) for name in "ABCD")


def others(*gpus: GpuFact) -> list[GpuFact]:
    """Return GPUs that the driver lists and the job does not hold."""
    return [replace(gpu, allocated=False) for gpu in gpus]


def test_gpus_are_paired_with_their_replacements() -> None:
    """Old GPUs of the job map to new ones; all listed GPUs are included, or none if nothing changes."""
    assert pair_gpus([A, B], [A, B]) is None
    assert pair_gpus([A, *others(B)], [*others(A), B]) == {"GPU-A": "GPU-B", "GPU-B": "GPU-A"}
    assert pair_gpus([A, *others(B)], [C, *others(D)]) == {"GPU-A": "GPU-C", "GPU-B": "GPU-D"}
    assert pair_gpus([A, B], [B, C]) == {"GPU-B": "GPU-B", "GPU-A": "GPU-C"}


@given(data=st.data(), count=st.integers(1, 6))
def test_pairs_are_a_permutation_within_models(data: st.DataObject, count: int) -> None:
    models = data.draw(st.lists(st.sampled_from(["H100", "L40S"]), min_size=count, max_size=count))
    held = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    old = [GpuFact(f"GPU-{i}", m, 1, a) for i, (m, a) in enumerate(zip(models, held, strict=True))]
    order = data.draw(st.permutations(range(count)))
    new = [GpuFact(f"GPU-{i + data.draw(st.just(100))}", old[i].model, 1, old[i].allocated) for i in order]
    pairs = pair_gpus(old, new)
    assert isinstance(pairs, dict)
    assert set(pairs) == {gpu.uuid for gpu in old}
    assert set(pairs.values()) == {gpu.uuid for gpu in new}
    by_uuid = {gpu.uuid: gpu for gpu in (*old, *new)}
    assert all(by_uuid[a].model == by_uuid[b].model for a, b in pairs.items())


def test_gpus_that_do_not_match_are_refused() -> None:
    """Their number, that of the allocated ones, or their model differs."""
    for old, new, code in (
        ([A], [A, B], "gpu-count"),
        ([A, *others(B)], [A, B], "gpu-count"),
        ([A], [replace(B, model="L40S")], "gpu-model"),
    ):
        result = pair_gpus(old, new)
        assert isinstance(result, Refusal)
        assert result.code == code


ENDED, QUEUED, LATER, THIS, UNKNOWN = (
    JobFact.ENDED, JobFact.QUEUED, JobFact.LATER_RUN, JobFact.THIS_RUN, JobFact.UNKNOWN,
)  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "world", "actions", "leads_to"),
    [
        ("dumping", World(ENDED, tree=True, image=True), "kill-tree drop-image close", None),
        ("queued", World(ENDED, tree=False, image=False), "drop-image close", None),
        ("running", World(THIS, tree=True, image=False), "close", None),
        ("dumped", World(THIS, tree=True, image=True), "requeue", "requeueing"),
        ("dumped", World(UNKNOWN, tree=True, image=True), "wait", "dumped"),
        ("dumped", World(THIS, tree=True, image=False), "drop-image resume close", None),
        ("dumping", World(THIS, tree=True, image=True), "drop-image resume close", None),
        ("dumping", World(UNKNOWN, tree=True, image=True), "drop-image resume close", None),
        ("parked", World(QUEUED, tree=True, image=False), "drop-image resume close", None),
        ("dumped", World(QUEUED, tree=True, image=True), "kill-tree", "queued"),
        ("dumped", World(LATER, tree=True, image=False), "drop-image resume close", None),
        ("dumping", World(LATER, tree=True, image=True), "drop-image resume close", None),
        ("dumped", World(UNKNOWN, tree=False, image=True), "wait", "dumped"),
        ("dumped", World(QUEUED, tree=False, image=True), "", "queued"),
        ("dumped", World(QUEUED, tree=False, image=False), "drop-image lost", None),
        ("dumping", World(THIS, tree=False, image=True), "drop-image lost", None),
        ("requeueing", World(UNKNOWN, tree=False, image=False), "wait", "requeueing"),
        ("requeueing", World(THIS, tree=True, image=False), "resume close", None),
        ("requeueing", World(THIS, tree=False, image=False), "close", None),
        ("requeueing", World(THIS, tree=True, image=True), "requeue", "requeueing"),
        ("requeueing", World(QUEUED, tree=True, image=True), "kill-tree", "queued"),
        ("requeueing", World(QUEUED, tree=False, image=True), "", "queued"),
        ("queued", World(UNKNOWN, tree=False, image=False), "wait", "queued"),
        ("queued", World(QUEUED, tree=False, image=False), "close", None),
        ("queued", World(QUEUED, tree=True, image=True), "kill-tree", "queued"),
        ("queued", World(UNKNOWN, tree=True, image=True), "", "queued"),
        ("queued", World(LATER, tree=False, image=True), "", "queued"),
        ("restoring", World(LATER, tree=False, image=True), "restore", "restoring"),
        ("restoring", World(UNKNOWN, tree=True, image=True), "restore", "restoring"),
        ("restoring", World(UNKNOWN, tree=False, image=True), "", "queued"),
        ("restoring", World(QUEUED, tree=True, image=True), "", "queued"),
        ("restoring", World(LATER, tree=True, image=False), "close", None),
        ("frozen", World(THIS, tree=True, image=False), "sleep", "frozen"),
        ("locked", World(UNKNOWN, tree=True, image=False, in_place=True), "wake", "waking"),
        ("locking", World(THIS, tree=True, image=False, in_place=True), "drop-image resume close", None),
    ],
)
def test_recovery_of_each_phase(phase: str, world: World, actions: str, leads_to: str | None) -> None:
    """An image is used only if its dump has ended, and a job without image and processes is lost."""
    recovery = recover(Phase(phase), world)
    assert (" ".join(recovery.actions), recovery.phase) == (actions, None if leads_to is None else Phase(leads_to))


def test_wake_after_a_crash_has_its_reason() -> None:
    world = World(THIS, tree=True, image=False, in_place=True)
    assert recover(Phase.WAKING, world).why == "it was waking"
    assert recover(Phase.PARKED, world).why == "its suspension is rolled back"
