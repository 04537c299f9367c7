"""What is done after a crash: none loses or doubles a job."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from hypothesis import example, given
from hypothesis import strategies as st

from slurm_affinode.core.suspension import (
    IN_PLACE,
    Action,
    JobFact,
    World,
    pair_gpus,
    recover,
)
from slurm_affinode.model.suspension import GpuFact, Phase, Refusal


@dataclass(frozen=True)
class Job:
    """What is true of a job, whatever anybody has written down."""

    tree: str = "running"
    """``running``, ``held`` (locked, out of its GPU, or stopped), ``gone``."""
    image: bool = False
    """Complete, and exactly what the tree is."""
    slurm: str = "running"
    """``running`` (the run that is suspended), ``queued``."""
    copies: int = 0
    """How often it was begun anew without its image, or went on beside its image: must stay 0."""


@dataclass
class Machine:
    """The effects of a suspension, one after the other; any of them may be the last before the crash."""

    job: Job
    budget: int

    def effect(self, **changes: object) -> None:
        """One effect on the world."""
        if self.budget == 0:
            raise KeyboardInterrupt
        self.budget -= 1
        self.job = replace(self.job, **changes)


def suspend(machine: Machine, journal: list[Phase]) -> None:
    """As the agent does it: the journal first, then the effect."""
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
    """What recovery sees."""
    job = machine.job
    said = JobFact.QUEUED if job.slurm == "queued" else JobFact.THIS_RUN
    return World(said if slurm_answers else JobFact.UNKNOWN, job.tree != "gone", job.image)


def act(machine: Machine, action: Action) -> None:
    """One action of recovery."""
    match action:
        case Action.RESUME:
            assert not machine.job.image, "an image that can be found is older than the tree that goes on"
            machine.effect(tree="running")
        case Action.DROP_IMAGE:
            assert machine.job.tree != "gone" or not machine.job.image, "the only copy of the job was removed"
            machine.effect(image=False)
        case Action.REQUEUE:
            assert machine.job.image
            machine.effect(slurm="queued")
        case Action.KILL_TREE:
            assert machine.job.image
            machine.effect(tree="gone")
        case Action.WAIT | Action.CLOSE | Action.LOST | Action.RESTORE | Action.SLEEP | Action.WAKE:
            pass


@given(
    steps=st.lists(st.integers(0, 18), min_size=1, max_size=6),
    answers=st.lists(st.booleans(), min_size=6, max_size=6),
)
@example(steps=[9, 1, 1], answers=[True, False, False, False, False, False])
def test_each_crash_ends_in_a_running_job_or_a_complete_image(steps: list[int], answers: list[bool]) -> None:
    """The agent dies after any number of effects, recovers, dies again while it does, whether Slurm answers or not."""
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
    """One start of the agent; whether the suspension is over."""
    if journal[-1] is Phase.RUNNING:
        return True
    found = recover(journal[-1], facts(machine, answered))
    for action in found.actions:
        act(machine, action)
    machine.effect()
    if found.phase is None:
        journal.append(Phase.RUNNING)
        return True
    journal.append(found.phase)
    return False


@given(phase=st.sampled_from(Phase), tree=st.booleans(), image=st.booleans(), job=st.sampled_from(JobFact))
def test_recovery_harms_nothing(phase: Phase, tree: bool, image: bool, job: JobFact) -> None:
    """In any state of the world: no kill without an image, no image removed that is all there is of a live job."""
    found = recover(phase, World(job, tree, image))
    over = job is JobFact.ENDED
    if Action.KILL_TREE in found.actions:
        assert over or image
    if Action.DROP_IMAGE in found.actions and not over:
        assert tree or not image or phase not in (Phase.DUMPED, Phase.REQUEUEING, Phase.QUEUED, Phase.RESTORING)
    if Action.RESUME in found.actions:
        assert tree
        assert not image or found.actions.index(Action.DROP_IMAGE) < found.actions.index(Action.RESUME)
    if Action.REQUEUE in found.actions:
        assert image
        assert job is JobFact.THIS_RUN
    assert bool({Action.CLOSE, Action.LOST} & set(found.actions)) == (found.phase is None)
    if Action.LOST in found.actions:
        assert not tree
        assert not over


@given(
    steps=st.lists(st.integers(0, 9), min_size=1, max_size=6), answers=st.lists(st.booleans(), min_size=6, max_size=6)
)
def test_each_crash_in_place_ends_in_a_running_job_or_one_that_can_wake(steps: list[int], answers: list[bool]) -> None:
    """The agent dies after any number of effects, also of its recovery: nothing is killed, nothing is forgotten."""
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
            found = recover(journal[-1], world)
            assert not {Action.KILL_TREE, Action.REQUEUE, Action.RESTORE, Action.WAIT} & set(found.actions)
            for action in found.actions:
                if action is Action.WAKE:
                    machine.effect()
                    journal.append(Phase.WAKING)
                    machine.effect(tree="running")
                elif action is Action.SLEEP:
                    machine.effect(tree="held")
                else:
                    act(machine, action)
            if found.phase is not Phase.FROZEN:
                machine.effect()
                journal.append(Phase.RUNNING)
    assert (machine.job.tree, machine.job.copies, machine.job.image) in (("running", 0, False), ("held", 0, False))
    assert (machine.job.tree == "running") == (journal[-1] is not Phase.FROZEN)


def test_one_that_sleeps_in_place_and_is_requeued_by_somebody_else_is_let_go() -> None:
    """Slurm ends its processes, which have to hear of it."""
    for phase in (Phase.FROZEN, Phase.WAKING):
        for job in (JobFact.QUEUED, JobFact.LATER_RUN):
            assert recover(phase, World(job, tree=True, image=False, in_place=True)).actions == (Action.WAKE,)
        assert recover(phase, World(JobFact.ENDED, tree=True, image=False, in_place=True)).phase is None


def test_processes_that_have_gone_with_their_node_are_told_when_slurm_answers() -> None:
    """Without an image there is nothing else to be done; a job that is over needs no word."""
    for phase in (Phase.LOCKING, Phase.LOCKED, Phase.PARKED, Phase.FROZEN, Phase.WAKING):
        for in_place in (True, False) if phase not in IN_PLACE else (True,):

            def found(job: JobFact, phase: Phase = phase, in_place: bool = in_place) -> tuple[Action, ...]:
                return recover(phase, World(job, tree=False, image=False, in_place=in_place)).actions

            assert found(JobFact.UNKNOWN) == (Action.WAIT,)
            for job in (JobFact.THIS_RUN, JobFact.QUEUED, JobFact.LATER_RUN):
                assert found(job)[-1] is Action.LOST
            assert found(JobFact.ENDED)[-1] is Action.CLOSE


def test_slurm_silent_after_a_requeue_leaves_the_tree_stopped() -> None:
    """It may have accepted: a tree that went on would run beside its image."""
    found = recover(Phase.REQUEUEING, World(JobFact.UNKNOWN, tree=True, image=True))
    assert found.actions == (Action.WAIT,)


A, B, C, D = (GpuFact(f"GPU-{name}", "H100", 80) for name in "ABCD")


def others(*gpus: GpuFact) -> list[GpuFact]:
    """GPUs that the driver shows and the job does not hold."""
    return [replace(gpu, allocated=False) for gpu in gpus]


def test_gpus_take_each_others_places() -> None:
    """The job's new GPUs those of its old ones; all that the driver shows are named; none where nothing moves."""
    assert pair_gpus([A, B], [A, B]) is None
    assert pair_gpus([A, *others(B)], [*others(A), B]) == {"GPU-A": "GPU-B", "GPU-B": "GPU-A"}
    assert pair_gpus([A, *others(B)], [C, *others(D)]) == {"GPU-A": "GPU-C", "GPU-B": "GPU-D"}
    assert pair_gpus([A, B], [B, C]) == {"GPU-B": "GPU-B", "GPU-A": "GPU-C"}


@given(data=st.data(), count=st.integers(1, 6))
def test_pairs_are_a_permutation_that_keeps_models(data: st.DataObject, count: int) -> None:
    """Or a refusal that says why."""
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


def test_gpus_that_do_not_fit_are_refused() -> None:
    """Another number, another model."""
    for old, new, code in (([A], [A, B], "gpu-count"), ([A], [replace(B, model="L40S")], "gpu-model")):
        found = pair_gpus(old, new)
        assert isinstance(found, Refusal)
        assert found.code == code
