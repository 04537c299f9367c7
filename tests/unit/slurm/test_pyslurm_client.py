"""The client based on pyslurm: the real worker on a fake pyslurm, and workers that die, hang or send invalid data."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from slurm_controller import InProcess, RPCError

from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.process import ChildEndedError, Completed
from slurm_affinode.model.cluster import NodeGpus
from slurm_affinode.slurm import interface, pyslurm_worker
from slurm_affinode.slurm.client import difference, examine, open_client, release_of_library
from slurm_affinode.slurm.commands_client import CommandsClient
from slurm_affinode.slurm.pyslurm_client import MAX_AGE_S, PyslurmClient, start_worker


class Tres:
    def __init__(self, **amounts):
        self.amounts = amounts

    def to_dict(self, recursive):
        gres = {name: {"count": n, "type_and_name": f"gres/{name}"} for name, n in self.amounts.items()}
        return {"cpu": {"count": 2, "type_and_name": "cpu"}, "mem": {"count": 100, "type_and_name": "mem"},
                "pages": None, "gres": gres, "raw_str": None}  # fmt: skip


def record(number, state="RUNNING", **more):
    values = dict.fromkeys(pyslurm_worker.JOB) | {"id": number, "state": state, "name": f"j{number}", "priority": 5}
    tres = {"requested_tres": Tres(gpu=1), "allocated_tres": Tres(gpu=1) if state == "RUNNING" else None}
    return SimpleNamespace(**(values | tres | {"steps": {}} | more))


def made_up(jobs, did):
    """Return a fake pyslurm module with these jobs; actions are recorded in ``did``."""

    class Job:
        def __init__(self, number):
            self.number = number

        @staticmethod
        def load(number):
            if number not in jobs:
                raise RPCError("Invalid job id specified")
            return jobs[number]

        def hold(self):
            did.append(("hold", self.number))

        def release(self):
            raise RPCError("Access/permission denied")

        def requeue(self, hold):
            did.append(("requeue", self.number, hold))

        def modify(self, changes):
            did.append(("modify", self.number, changes))

        def notify(self, message):
            raise RuntimeError("a bug")

    class Node:
        def __init__(self, name=None, **changes):
            self.name, self.changes = name, changes

        def modify(self, node):
            did.append(("node", self.name, node.changes))

    class Jobs(dict):
        def load_steps(self):
            did.append("steps")

    return SimpleNamespace(
        __version__="25.11.2",
        slurm_init=lambda: did.append("init"),
        Job=Job,
        Jobs=SimpleNamespace(load=lambda **_: Jobs(jobs)),
        JobSteps=SimpleNamespace(load_all=dict),
        JobSubmitDescription=lambda **changes: changes,
        Node=Node,
        Nodes=SimpleNamespace(load=dict),
        slurmctld=SimpleNamespace(ping_all=lambda: [SimpleNamespace(is_responding=True)]),
    )


class Broken(InProcess):
    """Fails at the ``nth`` request with ``how``."""

    def __init__(self, module, how, nth=2):
        super().__init__(module)
        self.how, self.left = how, nth

    def ask(self, line, *, timeout_s):
        self.left -= 1
        if self.left:
            return super().ask(line, timeout_s=timeout_s)
        if isinstance(self.how, Exception):
            raise self.how
        return self.how


def commands(argv, *, timeout_s, env=None, check=True):
    """Stand in for Slurm's commands, on their own cluster."""
    if "--version" in argv:
        return Completed(tuple(argv), 0, b"slurm 26.05.5\n", "")
    if "--json=list" in argv:
        return Completed(tuple(argv), 0, b"data_parser/v0.0.45\n", "")
    jobs = [{"job_id": 5, "job_state": ["RUNNING"], "nodes": "c1", "gres_detail": ["gpu:1(IDX:1)"]},
            {"job_id": 6, "job_state": ["RUNNING"], "array_job_id": 6, "array_task_id": 2}]  # fmt: skip
    return Completed(tuple(argv), 0, json.dumps({"jobs": jobs, "steps": []}).encode(), "")


def client_of(*workers, clock=lambda: 0.0, run=commands):
    left = list(workers)
    return PyslurmClient(CommandsClient(run), lambda: left.pop(0), clock=clock)


@pytest.fixture
def did():
    return []


@pytest.fixture
def module(did):
    return made_up({5: record(5), 6: record(6, array_id=6, array_task_id=2), 7: record(7, "PENDING")}, did)


def test_queue_is_one_request_and_gpu_indices_one_more(module, did):
    client = client_of(InProcess(module))
    jobs = {job.job_id: job for job in client.jobs(steps=True, gpu_detail=True)}
    assert did == ["init", "steps"]
    assert jobs[5].node_gpus is not None
    assert jobs[5].node_gpus[0].indices == (1,)
    assert jobs[5].tres_allocated == {"cpu": "2", "mem": "100M", "gres/gpu": "1"}
    assert (jobs[6].id, jobs[7].node_gpus, jobs[7].pending) == ("6_2", (), True)
    assert all(job.node_gpus is None for job in client.jobs())


def test_overview_takes_gpu_indices_from_one_text(did):
    """They are not read from JSON of every job; unambiguous jobs are not requested singly."""
    ran = []
    text = b"JobId=5 JobName=j5 UserId=a(1)   Nodes=c1 CPU_IDs=0 Mem=1 GRES=gpu:1(IDX:3) MinCPUsNode=1\n"

    def run(argv, **more):
        ran.append(list(argv))
        return Completed(tuple(argv), 0, text, "")

    module = made_up({5: record(5, allocated_nodes="c1"), 7: record(7, "PENDING")}, did)
    jobs = {job.job_id: job for job in client_of(InProcess(module), run=run).overview()}
    assert jobs[5].node_gpus == (NodeGpus("c1", 1, None, (3,)),)
    assert (jobs[7].node_gpus, jobs[7].pending) == ((), True)
    assert ran == [["scontrol", "--all", "--oneliner", "--details", "show", "jobs"]]


def test_plain_jobs_use_pyslurm_and_all_others_the_commands(module, did):
    ran = []

    def run(argv, **more):
        ran.append(argv)
        return commands(argv, **more)

    client = client_of(InProcess(module), run=run)
    client.hold(5)
    client.requeue(5, hold=True)
    client.set_comment(5, "x")
    client.drain("c1", "why")
    client.resume("c1")
    assert ran == []
    assert did[1:] == [("hold", 5), ("requeue", 5, True), ("modify", 5, {"comment": "x"}),
                       ("node", "c1", {"state": "DRAIN", "reason": "why"}),
                       ("node", "c1", {"state": "RESUME"})]  # fmt: skip
    client.requeue(5, hold=True, running=True)
    assert ran.pop()[-3:] == ["requeuehold", "incomplete", "5"]
    client.hold(6)
    client.hold("6_2")
    client.hold(5, by_user=True)
    client.set_comment(5, "")
    client.cancel(5)
    acts = [argv[:3] for argv in ran if not {"show", "--json=list"} & {*argv}]
    assert acts == [["scontrol", "--", "hold"], ["scontrol", "--", "hold"],
        ["scontrol", "--", "uhold"], ["scontrol", "--", "update"], ["scancel", "--verbose", "--"]]  # fmt: skip


def test_errors_of_slurm_and_of_pyslurm_differ(module):
    client = client_of(InProcess(module))
    with pytest.raises(interface.NotPermittedError):
        client.release(5)
    with pytest.raises(interface.SlurmError, match="pyslurm failed: RuntimeError: a bug"):
        client.notify(5, "x")
    assert client.steps(99) == ()


@pytest.mark.parametrize("how", [ChildEndedError("was ended by signal 11"), b"Segmentation fault", b"[]"])
def test_dead_worker_is_an_error_and_is_replaced(module, did, how):
    """A query is retried immediately in a new process; an action is not, since it may have been done."""
    client = client_of(Broken(module, how), InProcess(module))
    assert len(client.jobs()) == 3
    dying = Broken(module, how, nth=3)  # hello, the job, then the action
    client = client_of(dying, InProcess(module))
    with pytest.raises(interface.WorkerDiedError, match="hold job 5: the pyslurm process"):
        client.hold(5)
    client.hold(5)
    assert [item for item in did if item == ("hold", 5)] == [("hold", 5)]


def test_worker_that_dies_twice_is_an_error(module):
    end = ChildEndedError("was ended by signal 11")
    client = client_of(Broken(module, end), Broken(module, end), InProcess(module))
    with pytest.raises(interface.WorkerDiedError, match="signal 11"):
        client.jobs()
    assert len(client.jobs()) == 3


def test_missing_slurm_conf_is_reported(module):
    message = "ended with status 1: fatal: Unable to process configuration file"
    client = client_of(Broken(module, ChildEndedError(message), nth=1))
    with pytest.raises(interface.ControllerDownError, match="Unable to process configuration") as caught:
        client.jobs()
    assert "slurm.conf" in str(caught.value.hint)


def test_old_worker_is_replaced(module):
    """libslurm reads slurm.conf once."""
    now = [0.0]
    first, second = InProcess(module), InProcess(module)
    client = client_of(first, second, clock=lambda: now[0])
    client.nodes()
    now[0] = MAX_AGE_S + 1
    client.nodes()
    assert (first.closed, second.closed) == (True, False)
    with client:
        client.ping()
    assert second.closed


def test_worker_replies_to_an_invalid_request_with_an_error():
    worker = pyslurm_worker.RequestExecutor(lambda _: SimpleNamespace(slurm_init=lambda: None))
    for line in (b"", b"{}", b'{"call": "shutdown"}', b"[]", b'{"call": "hold", "args": {"x": 1}}'):
        assert worker.answer(line)["error"]["kind"] == "bug"


def test_worker_imports_nothing_from_the_working_directory(tmp_path, monkeypatch):
    """root may query the status of a job in a directory of another user."""
    (tmp_path / "slurm_affinode.py").write_text("raise SystemExit('mine')\n")
    (tmp_path / "ctypes.py").write_text("raise SystemExit('mine')\n")
    monkeypatch.chdir(tmp_path)
    worker = start_worker()
    try:
        assert "error" in json.loads(worker.ask(b"{}", timeout_s=60))
    finally:
        worker.close()


class Reader:
    """A client with one running job."""

    def __init__(self, job):
        self._job = job

    def jobs(self):
        return (self._job,)

    def job(self, number):
        if number != self._job.job_id:
            raise interface.UnknownJobError("no such job")
        return self._job


def test_pyslurm_of_another_release_is_compared_with_scontrol(module, monkeypatch):
    """It may read moved fields of a struct without an error. Without a job to compare, commands are used too."""
    (right,) = PyslurmClient(CommandsClient(commands), lambda: InProcess(module)).jobs()[:1]
    right = replace(right, start=right.submit)
    assert difference(Reader(right), Reader(right)) is None
    wrong = difference(Reader(replace(right, cpus=65536)), Reader(replace(right, cpus=6)))
    assert wrong == "of job 5, it reads cpus 65536, scontrol 6"
    assert difference(Reader(replace(right, state="PENDING", nodes=())), Reader(right)) is not None
    monkeypatch.setattr(pyslurm_worker, "_api", lambda _: 45)
    warnings = []
    with open_client("auto", run=commands, start=lambda: InProcess(module), warned=warnings.append) as client:
        assert client.backend == "commands"
    (line,) = warnings
    assert line.startswith(
        "pyslurm is not used: it is for Slurm 25.11, the site's Slurm is 26.05, and of job 5, it reads "
    )
    _, result = examine(commands, lambda: InProcess(module))
    assert not result.usable
    assert str(result.reason) in line


def test_auto_uses_pyslurm_if_its_library_matches_the_release(module, monkeypatch):
    module.__version__ = "26.5.0"
    for api, backend in ((45, "pyslurm"), (42, "commands"), (None, "commands")):
        monkeypatch.setattr(pyslurm_worker, "_api", lambda _, api=api: api)
        with open_client("auto", run=commands, start=lambda: InProcess(module)) as client:
            assert client.backend == backend
    assert open_client("commands", run=commands).backend == "commands"
    with pytest.raises(interface.BackendUnusableError, match="libslurm is that of Slurm"):
        open_client("pyslurm", run=commands, start=lambda: InProcess(module))
    with pytest.raises(interface.BackendUnusableError, match="No module named 'pyslurm'"):
        open_client("pyslurm", run=commands, start=lambda: InProcess(None))
    with open_client("auto", run=commands, start=lambda: InProcess(None)) as client:
        assert client.backend == "commands"


def test_without_slurm_there_is_no_client():
    def nothing(argv, **_):
        raise UnreachableError(f"{argv[0]}: no such program")

    with pytest.raises(UnreachableError, match="no such program"):
        open_client("auto", run=nothing, start=lambda: InProcess(None))
    examination = examine(nothing, lambda: InProcess(None))
    assert [item.usable for item in examination] == [False, False]
    assert all(isinstance(group.reason, str) for group in examination)


def test_library_number_is_mapped_to_a_release():
    """Each half-yearly release of Slurm has one API number."""
    known = {40: "23.11", 41: "24.05", 42: "24.11", 43: "25.05", 44: "25.11", 45: "26.05"}
    assert {number: release_of_library(number) for number in known} == known


def test_errors_are_subclasses_of_affinode_error():
    for kind in (interface.WorkerDiedError, interface.BackendUnusableError, interface.SlurmError):
        assert issubclass(kind, AffinodeError)
