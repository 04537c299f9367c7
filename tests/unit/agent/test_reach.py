"""From a job to the agent that knows it; munge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_stand_ins import NODE, Slurm, config_of, job, waiting

from slurm_affinode.agent import munge
from slurm_affinode.agent.client import AnswerError
from slurm_affinode.agent.daemon import ASK_S
from slurm_affinode.agent.orphans import KILL_S, TERM_S
from slurm_affinode.agent.reach import Reach
from slurm_affinode.errors import UnreachableError
from slurm_affinode.process import Completed


class Agents:
    """Agents that know jobs: node -> raw ids."""

    def __init__(
        self, known: dict[str, set[int]], local: str | None = None, down: frozenset[str] = frozenset()
    ) -> None:
        self.known, self.here, self.down = known, local, down
        self.asked: list[str] = []
        self.timeouts_s: list[float] = []

    def local(self, run_dir: Path, request: dict[str, Any], **_: object) -> dict[str, Any]:
        if self.here is None:
            raise UnreachableError("control.sock: no agent runs on this node")
        return self._answer(self.here, request)

    def node(self, host: str, port: int, node: str, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        assert port == 9999
        self.asked.append(node)
        self.timeouts_s.append(timeout_s)
        if node in self.down:
            raise UnreachableError(f"the agent on {node} does not answer: Connection refused")
        return self._answer(node, request)

    def _answer(self, node: str, request: dict[str, Any]) -> dict[str, Any]:
        if "job" in request and request["job"] not in self.known.get(node, set()):
            raise AnswerError("unknown-job", "no such job", hint=None, exit_code=1)
        return {"node": node, "jobs": [{"job_id": one} for one in sorted(self.known.get(node, set()))]}


@pytest.fixture
def reach(tmp_path: Path) -> Callable[[Agents, Slurm], Reach]:
    def make(agents: Agents, slurm: Slurm) -> Reach:
        config = config_of(tmp_path, agent='listen = "0.0.0.0:9999"')
        config = replace(config, agent=replace(config.agent, node="login"))
        return Reach(config, slurm.client, agents.local, agents.node)

    return make


MakeReach = Callable[[Agents, Slurm], Reach]


def test_running_job_is_asked_of_its_batch_host(reach: MakeReach) -> None:
    """From the login node, by munge; the second question goes there straight."""
    agents = Agents({"c1": {7}})
    way = reach(agents, slurm := Slurm({7: job()}))
    assert way.about("7", {"verb": "status"})["node"] == "c1"
    assert way.about("7", {"verb": "status"})["node"] == "c1"
    assert (agents.asked, slurm.asked) == (["c1", "c1"], 1)


def test_a_process_has_the_time_that_the_agent_gives_it_to_end(reach: MakeReach) -> None:
    """Else what was ended is told as a failure."""
    way = reach(agents := Agents({}), Slurm())
    way.ask("c1", {"verb": "status"})
    way.ask("c1", {"verb": "kill-orphan", "pid": 5, "start_ticks": 6})
    assert agents.timeouts_s[0] == 10.0
    assert agents.timeouts_s[1] > TERM_S + KILL_S + ASK_S


def test_local_agent_is_asked_first(reach: MakeReach) -> None:
    """On the node itself slurmctld is not needed."""
    slurm = Slurm({}, down=True)
    assert reach(Agents({"login": {7}}, local="login"), slurm).about("7", {"verb": "status"})["node"] == "login"


def test_suspended_job_is_asked_of_any_node_that_sees_it(reach: MakeReach) -> None:
    """First of the one that its comment names; one that does not answer is passed over."""
    nodes = tuple(replace(NODE, name=name) for name in ("c1", "c2", "c3"))
    agents = Agents({"c3": {7}}, down=frozenset({"c2"}))
    slurm = Slurm({7: waiting(7, comment="suspended: idle 15m, on c2, wake with ...")}, nodes)
    assert reach(agents, slurm).about("7", {"verb": "wake"})["node"] == "c3"
    assert agents.asked == ["c2", "c1", "c3"]


def test_suspended_job_that_was_moved_to_a_partition_without_agents(reach: MakeReach) -> None:
    """In its sleep: an agent of another one knows it; those of its own are asked first."""
    nodes = tuple(replace(NODE, name=name, partitions=(name,)) for name in ("c1", "c2"))
    for partition, asked in (("cpu", ["c1"]), ("c2", ["c2", "c1"])):
        agents = Agents({"c1": {7}})
        slurm = Slurm({7: waiting(7, partitions=(partition,))}, nodes)
        assert reach(agents, slurm).about("7", {"verb": "wake"})["node"] == "c1"
        assert agents.asked == asked


NO_GPU = {"gpus_requested": None, "gpus_allocated": None, "node_gpus": ()}


@pytest.mark.parametrize(
    ("slurm", "agents", "code", "said"),
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
def test_what_is_wrong_has_a_name(reach: MakeReach, slurm: Slurm, agents: Agents, code: str, said: str) -> None:
    """And exit status 1."""
    with pytest.raises(AnswerError, match=said) as caught:
        reach(agents, slurm).about("7", {"verb": "suspend"})
    assert (caught.value.code, caught.value.exit_code) == (code, 1)


def test_agent_that_cannot_be_reached(reach: MakeReach) -> None:
    """Exit status 3, with what was tried."""
    with pytest.raises(UnreachableError, match=r"no agent could be asked about job 7: .*c1 does not answer") as caught:
        reach(Agents({}, down=frozenset({"c1"})), Slurm({7: job()})).about("7", {"verb": "status"})
    assert caught.value.exit_code == 3
    uncounted = job(gpus_requested=None, gpus_allocated=None)  # AccountingStorageTRES lacks gres/gpu
    shards = job(**NO_GPU)  # which are no GPUs to Slurm
    for one in (uncounted, shards):
        with pytest.raises(UnreachableError):
            reach(Agents({}, down=frozenset({"c1"})), Slurm({7: one})).about("7", {"verb": "status"})


def test_what_is_no_job_is_not_asked(reach: MakeReach) -> None:
    """Nothing goes out."""
    for text in ("--help", "7;reboot", "", "7.batch"):
        with pytest.raises(Exception, match="job"):
            reach(Agents({}), Slurm({})).about(text, {"verb": "status"})


def test_everywhere(reach: MakeReach) -> None:
    """A user's nodes with GPUs, also where it has shards of them; for root all; what went wrong is told by node."""
    nodes = tuple(replace(NODE, name=name) for name in ("c1", "c2"))
    slurm = Slurm({7: job(), 8: job(8, user="bob", batch_host="c2", nodes=("c2",))}, nodes)
    agents = Agents({"c1": {7}, "c2": {8}}, down=frozenset({"c2"}))
    assert [node for node, _ in reach(agents, slurm).everywhere((), 2001, user="alice")] == ["c1"]
    shards = Slurm({7: job(gpus_allocated=None), 8: job(8, gpus_allocated=None, batch_host="cpu1")}, nodes)
    assert [node for node, _ in reach(agents, shards).everywhere((), 2001, user="alice")] == ["c1"]
    found = dict(reach(agents, slurm).everywhere((), 0, user="root"))
    assert isinstance(found["c1"], dict)
    assert "does not answer" in str(found["c2"])


@pytest.mark.parametrize("comment", ["suspended: idle 15m", "not restored: bad size", "mine", None])
def test_nodes_are_asked_for_a_job_that_may_sleep(reach: MakeReach, comment: str | None) -> None:
    """Also for one whose restore has failed, or whose owner has changed the comment: it was requeued."""
    slurm = Slurm({7: waiting(7, user="alice", restarts=1, comment=comment), 8: waiting(8)}, (NODE,))
    agents = Agents({"c1": {7}})
    assert [node for node, _ in reach(agents, slurm).everywhere((), 2001, user="alice")] == ["c1"]
    assert not list(reach(agents, slurm).everywhere((), 2002, user="bob"))


# --- munge

CREDENTIAL = b"MUNGE:AwQFAAD0123456789abcdef:"


def said(stdout: bytes, stderr: str, returncode: int = 0) -> Callable[..., Completed]:
    def run(argv: tuple[str, ...], **_: object) -> Completed:
        return Completed(argv, returncode, stdout, stderr)

    return run


def test_credential_says_who_sent_it() -> None:
    """By the metadata of unmunge, not by the payload."""
    message = munge.decode(
        CREDENTIAL, run=said(b"UID: root (0)", "STATUS:           Success (0)\nUID:              alice (2001)\n")
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
def test_credential_that_munge_does_not_vouch_for(credential: bytes, stderr: str, code: int) -> None:
    """Not one, used before, without a sender."""
    with pytest.raises(munge.BadCredentialError):
        munge.decode(credential, run=said(b"{}", stderr, code))


def test_answer_is_for_one_user() -> None:
    """munge is asked to restrict it."""
    seen: list[tuple[str, ...]] = []

    def run(argv: tuple[str, ...], **_: object) -> Completed:
        seen.append(argv)
        return Completed(argv, 0, CREDENTIAL + b"\n", "")

    assert munge.encode(b"x", only_uid=2001, run=run) == CREDENTIAL
    assert "--restrict-uid=2001" in seen[0]
    with pytest.raises(UnreachableError, match="munged"):
        munge.encode(b"x", run=said(b"", "munge: Error: Failed to access munged", 6))


def test_an_agent_that_was_waited_for_in_vain_is_not_asked_again(reach: Callable[[Agents, Slurm], Reach]) -> None:
    """A stopped agent costs a run one time-out; one that refuses is asked again, since it may be back."""
    agents = Agents({}, down=frozenset({"c1"}))
    asking = reach(agents, Slurm({}, [NODE]))
    for _ in range(2):
        with pytest.raises(UnreachableError, match="the agent on c1 does not answer"):
            asking.ask("c1", {"verb": "status"})
    assert agents.asked == ["c1", "c1"]
    passing = iter(range(0, 1000, 10))
    asking.clock = lambda: next(passing)
    for _ in range(3):
        with pytest.raises(UnreachableError, match="the agent on c1 does not answer"):
            asking.ask("c1", {"verb": "status"})
    assert agents.asked == ["c1", "c1", "c1"]


def test_a_stopped_agent_of_this_node_is_not_asked_over_the_network(reach: Callable[[Agents, Slurm], Reach]) -> None:
    agents = Agents({})
    asking = reach(agents, Slurm({}, [NODE]))
    passing = iter(range(0, 1000, 10))
    asking.clock = lambda: next(passing)
    with pytest.raises(UnreachableError, match=r"control\.sock"):
        asking.ask("login", {"verb": "status"})
    assert agents.asked == []


def test_a_stopped_agent_of_this_node_costs_a_command_one_time_out(reach: Callable[[Agents, Slurm], Reach]) -> None:
    """Asked for all jobs, for one, and once more as the node of the job."""
    agents = Agents({"c1": {7}})
    asking = reach(agents, Slurm({7: job()}, [NODE]))
    asked: list[float] = []

    def stopped(run_dir: Path, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        asked.append(timeout_s)
        raise UnreachableError("control.sock: the agent does not answer: timed out")

    asking.ask_local = stopped
    passing = iter(range(0, 1000, 10))
    asking.clock = lambda: next(passing)
    answers = dict(asking.everywhere(["login", "c1"], 0, user="root"))
    assert answers["login"] == "control.sock: the agent does not answer: timed out"
    assert isinstance(answers["c1"], dict)
    assert asking.about("7", {"verb": "status"})["node"] == "c1"
    assert asked == [10.0]
