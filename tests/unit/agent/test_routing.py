"""Routing of requests from a job to the agent that knows it; munge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_stand_ins import NODE, Slurm, config_of, job, waiting

from slurm_affinode.agent import munge
from slurm_affinode.agent.client import AnswerError
from slurm_affinode.agent.daemon import CALL_S
from slurm_affinode.agent.orphans import KILL_S, TERM_S
from slurm_affinode.agent.routing import Reach
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.process import Completed


class Agents:
    """Agents that know jobs: node -> raw job IDs."""

    def __init__(
        self, known: dict[str, set[int]], local: str | None = None, down: frozenset[str] = frozenset()
    ) -> None:
        self.known, self.here, self.down = known, local, down
        self.queries: list[str] = []
        self.timeouts_s: list[float] = []
        self.code = "unknown-job"

    def local(self, run_dir: Path, request: dict[str, Any], **_: object) -> dict[str, Any]:
        if self.here is None:
            raise UnreachableError("control.sock: no agent runs on this node")
        return self._answer(self.here, request)

    def node(self, host: str, port: int, node: str, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        assert port == 9999
        self.queries.append(node)
        self.timeouts_s.append(timeout_s)
        if node in self.down:
            raise UnreachableError(f"the agent on {node} does not respond: Connection refused")
        return self._answer(node, request)

    def _answer(self, node: str, request: dict[str, Any]) -> dict[str, Any]:
        if "job" in request and request["job"] not in self.known.get(node, set()):
            raise AnswerError(self.code, "no such job", hint=None, exit_code=1)
        return {"node": node, "jobs": [{"job_id": item} for item in sorted(self.known.get(node, set()))]}


@pytest.fixture
def reach(tmp_path: Path) -> Callable[[Agents, Slurm], Reach]:
    def make(agents: Agents, slurm: Slurm) -> Reach:
        config = config_of(tmp_path, agent='listen = "0.0.0.0:9999"')
        config = replace(config, agent=replace(config.agent, node="login"))
        return Reach(config, slurm.client, agents.local, agents.node)

    return make


MakeReach = Callable[[Agents, Slurm], Reach]


def test_running_job_is_routed_to_batch_host(reach: MakeReach) -> None:
    """The login node sends requests through munge; the second one goes to the node directly."""
    agents = Agents({"c1": {7}})
    way = reach(agents, slurm := Slurm({7: job()}))
    assert way.about("7", {"verb": "status"})["node"] == "c1"
    assert way.about("7", {"verb": "status"})["node"] == "c1"
    assert (agents.queries, slurm.queries) == (["c1", "c1"], 1)


def test_kill_request_waits_for_process_to_end(reach: MakeReach) -> None:
    """Otherwise a successful kill would be reported as a failure."""
    way = reach(agents := Agents({}), Slurm())
    way.ask("c1", {"verb": "status"})
    way.ask("c1", {"verb": "kill-orphan", "pid": 5, "start_ticks": 6})
    assert agents.timeouts_s[0] == 10.0
    assert agents.timeouts_s[1] > TERM_S + KILL_S + CALL_S


def test_local_agent_is_queried_first(reach: MakeReach) -> None:
    """slurmctld is not needed on the node itself."""
    slurm = Slurm({}, down=True)
    assert reach(Agents({"login": {7}}, local="login"), slurm).about("7", {"verb": "status"})["node"] == "login"


def test_suspended_job_is_routed_to_any_node_that_knows_it(reach: MakeReach) -> None:
    """The node named in its comment is tried first; a node that does not respond is skipped."""
    nodes = tuple(replace(NODE, name=name) for name in ("c1", "c2", "c3"))
    agents = Agents({"c3": {7}}, down=frozenset({"c2"}))
    slurm = Slurm({7: waiting(7, comment="suspended: idle 15m, on c2, wake with ...")}, nodes)
    assert reach(agents, slurm).about("7", {"verb": "wake"})["node"] == "c3"
    assert agents.queries == ["c2", "c1", "c3"]


def test_suspended_job_moved_to_partition_without_agents_is_found(reach: MakeReach) -> None:
    """An agent of another partition knows it; those of its own partition are tried first."""
    nodes = tuple(replace(NODE, name=name, partitions=(name,)) for name in ("c1", "c2"))
    for partition, expected in (("cpu", ["c1"]), ("c2", ["c2", "c1"])):
        agents = Agents({"c1": {7}})
        slurm = Slurm({7: waiting(7, partitions=(partition,))}, nodes)
        assert reach(agents, slurm).about("7", {"verb": "wake"})["node"] == "c1"
        assert agents.queries == expected


NO_GPU = {"gpus_requested": None, "gpus_allocated": None, "node_gpus": ()}


@pytest.mark.parametrize(
    ("slurm", "agents", "code", "message"),
    [
        (Slurm({}), Agents({}), "unknown-job", "Slurm knows no job 7: there was none, or it ended a while ago"),
        (
            Slurm({7: job(**NO_GPU, batch_host="cpu1")}),
            Agents({}, down=frozenset({"cpu1"})),
            "no-gpu",
            "job 7 runs on cpu1 without a GPU",
        ),
        (Slurm({7: job(**NO_GPU)}), Agents({"c1": set()}), "not-opted-in", "submitted without --gpu-suspend-idle"),
        (Slurm({7: job()}), Agents({"c1": set()}), "not-opted-in", "submitted without --gpu-suspend-idle"),
        (Slurm({7: job(batch=False)}), Agents({"c1": set()}), "interactive", "only batch jobs can be suspended"),
        (Slurm({7: waiting(7, batch=False)}), Agents({}), "interactive", "only batch jobs can be suspended"),
        (Slurm({7: job(het_job_id=7, het_offset=0)}), Agents({"c1": set()}), "heterogeneous", "is a heterogeneous job"),
        (Slurm({7: job(het_job_id=6, het_offset=1)}), Agents({}), "heterogeneous", "is a heterogeneous job"),
        (Slurm({7: waiting(7)}), Agents({"c1": set()}), "not-suspended", "job 7 is pending, and not suspended"),
        (Slurm({7: job(state="COMPLETED")}), Agents({}), "ended", "job 7 has ended: COMPLETED"),
    ],
)
def test_errors_have_codes(reach: MakeReach, slurm: Slurm, agents: Agents, code: str, message: str) -> None:
    """The exit status is 1."""
    with pytest.raises(AnswerError, match=message) as caught:
        reach(agents, slurm).about("7", {"verb": "suspend"})
    assert (caught.value.code, caught.value.exit_code) == (code, 1)


def test_agent_that_has_just_started_does_not_deny_the_option(reach: MakeReach) -> None:
    """It does not know the jobs that ran before. Another agent may know the job."""
    agents = Agents({"login": set(), "c1": set()}, local="login")
    agents.code = "starting"
    with pytest.raises(AnswerError) as caught:
        reach(agents, Slurm({7: job()})).about("7", {"verb": "suspend"})
    assert caught.value.code == "starting"
    agents.known["c1"] = {7}
    assert reach(agents, Slurm({7: job()})).about("7", {"verb": "suspend"})["node"] == "c1"


def test_unreachable_agent_is_an_error(reach: MakeReach) -> None:
    """The exit status is 3, and the error lists the attempts."""
    with pytest.raises(UnreachableError, match=r"no agent responded about job 7: .*c1 does not respond") as caught:
        reach(Agents({}, down=frozenset({"c1"})), Slurm({7: job()})).about("7", {"verb": "status"})
    assert caught.value.exit_code == 3
    uncounted = job(gpus_requested=None, gpus_allocated=None)  # AccountingStorageTRES lacks gres/gpu
    shards = job(**NO_GPU)  # which Slurm does not count as GPUs
    for item in (uncounted, shards):
        with pytest.raises(UnreachableError):
            reach(Agents({}, down=frozenset({"c1"})), Slurm({7: item})).about("7", {"verb": "status"})


def test_invalid_job_id_is_rejected(reach: MakeReach) -> None:
    """No request is sent."""
    for text in ("--help", "7;reboot", "", "7.batch"):
        with pytest.raises(Exception, match="job"):
            reach(Agents({}), Slurm({})).about(text, {"verb": "status"})


def test_all_nodes_are_queried(reach: MakeReach) -> None:
    """A user's nodes with GPUs or shards of them; for root, all nodes; errors are reported per node."""
    nodes = tuple(replace(NODE, name=name) for name in ("c1", "c2"))
    slurm = Slurm({7: job(), 8: job(8, user="bob", batch_host="c2", nodes=("c2",))}, nodes)
    agents = Agents({"c1": {7}, "c2": {8}}, down=frozenset({"c2"}))
    assert [node for node, _ in reach(agents, slurm).everywhere((), 2001, user="alice")] == ["c1"]
    shards = Slurm({7: job(gpus_allocated=None), 8: job(8, gpus_allocated=None, batch_host="cpu1")}, nodes)
    assert [node for node, _ in reach(agents, shards).everywhere((), 2001, user="alice")] == ["c1"]
    result = dict(reach(agents, slurm).everywhere((), 0, user="root"))
    assert isinstance(result["c1"], dict)
    assert "does not respond" in str(result["c2"])


@pytest.mark.parametrize("comment", ["suspended: idle 15m", "not restored: bad size", "mine", None])
def test_nodes_are_queried_for_possibly_suspended_job(reach: MakeReach, comment: str | None) -> None:
    """Jobs with a failed restore, or with a comment changed by the owner, are included: they were requeued."""
    slurm = Slurm({7: waiting(7, user="alice", restarts=1, comment=comment), 8: waiting(8)}, (NODE,))
    agents = Agents({"c1": {7}})
    assert [node for node, _ in reach(agents, slurm).everywhere((), 2001, user="alice")] == ["c1"]
    assert not list(reach(agents, slurm).everywhere((), 2002, user="bob"))


# --- munge

CREDENTIAL = b"MUNGE:AwQFAAD0123456789abcdef:"


def printing(stdout: bytes, stderr: str, returncode: int = 0) -> Callable[..., Completed]:
    def run(argv: tuple[str, ...], **_: object) -> Completed:
        return Completed(argv, returncode, stdout, stderr)

    return run


def test_credential_identifies_sender() -> None:
    """According to the metadata of unmunge, not the payload."""
    message = munge.decode(
        CREDENTIAL, run=printing(b"UID: root (0)", "STATUS:           Success (0)\nUID:              alice (2001)\n")
    )
    assert message == munge.Message(b"UID: root (0)", 2001)


@pytest.mark.parametrize(
    ("credential", "stderr", "code"),
    [
        (b"{}", "", 0),
        (b"MUNGE:x:", "", 0),
        (CREDENTIAL + b"\n" + CREDENTIAL, "", 0),
        (CREDENTIAL, "STATUS:           Replayed credential (17)\nUID:              alice (2001)\n", 17),
        (CREDENTIAL, "STATUS:           Success (0)\n", 0),
        (CREDENTIAL, "UID: alice (2001)\n", 0),
    ],
)
def test_invalid_credential_is_rejected(credential: bytes, stderr: str, code: int) -> None:
    """The credential is malformed, replayed, or has no sender."""
    with pytest.raises(munge.BadCredentialError):
        munge.decode(credential, run=printing(b"{}", stderr, code))


def test_response_is_restricted_to_one_user() -> None:
    """munge restricts decoding to that user."""
    seen: list[tuple[str, ...]] = []

    def run(argv: tuple[str, ...], **_: object) -> Completed:
        seen.append(argv)
        return Completed(argv, 0, CREDENTIAL + b"\n", "")

    assert munge.encode(b"x", only_uid=2001, run=run) == CREDENTIAL
    assert "--restrict-uid=2001" in seen[0]
    with pytest.raises(UnreachableError, match="munged"):
        munge.encode(b"x", run=printing(b"", "munge: Error: Failed to access munged", 6))


def test_agent_that_timed_out_is_not_queried_again(reach: Callable[[Agents, Slurm], Reach]) -> None:
    """A stopped agent costs one timeout; one that refuses connections is retried, since it may be back."""
    agents = Agents({}, down=frozenset({"c1"}))
    asking = reach(agents, Slurm({}, [NODE]))
    for _ in range(2):
        with pytest.raises(UnreachableError, match="the agent on c1 does not respond"):
            asking.ask("c1", {"verb": "status"})
    assert agents.queries == ["c1", "c1"]
    passing = iter(range(0, 1000, 10))
    asking.clock = lambda: next(passing)
    for _ in range(3):
        with pytest.raises(UnreachableError, match="the agent on c1 does not respond"):
            asking.ask("c1", {"verb": "status"})
    assert agents.queries == ["c1", "c1", "c1"]


def test_stopped_local_agent_is_not_queried_over_network(reach: Callable[[Agents, Slurm], Reach]) -> None:
    agents = Agents({})
    asking = reach(agents, Slurm({}, [NODE]))
    passing = iter(range(0, 1000, 10))
    asking.clock = lambda: next(passing)
    with pytest.raises(UnreachableError, match=r"control\.sock"):
        asking.ask("login", {"verb": "status"})
    assert agents.queries == []


def test_stopped_local_agent_costs_one_timeout(reach: Callable[[Agents, Slurm], Reach]) -> None:
    """The queries for all jobs, for one job, and for its node share the timeout."""
    agents = Agents({"c1": {7}})
    asking = reach(agents, Slurm({7: job()}, [NODE]))
    timeouts_s: list[float] = []

    def stopped(run_dir: Path, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        timeouts_s.append(timeout_s)
        raise UnreachableError("control.sock: the agent does not respond: timed out")

    asking.ask_local = stopped
    passing = iter(range(0, 1000, 10))
    asking.clock = lambda: next(passing)
    answers = dict(asking.everywhere(["login", "c1"], 0, user="root"))
    assert answers["login"] == "control.sock: the agent does not respond: timed out"
    assert isinstance(answers["c1"], dict)
    assert asking.about("7", {"verb": "status"})["node"] == "c1"
    assert timeouts_s == [10.0]
