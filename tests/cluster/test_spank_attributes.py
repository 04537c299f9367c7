"""A job with the option differs from a plain one only as the tables in docs/spank.md say, attribute by attribute."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster.driver import Cluster, wait_until
from cluster.spank import OPTION, Pair, outcomes, submit_pair

pytestmark = pytest.mark.cluster

PAGE = Path(__file__).resolve().parents[2] / "docs" / "spank.md"
PROGRAMS = Path(__file__).parent
PLACE = ("--partition=gpu", "--nodelist=c1")
PROCESSES = ("script", "group", "session")
NAMESPACES = (
    """for kind in /proc/$(cat /run/slurmd.pid)/ns/*; do echo "${kind##*/}=$(readlink "$kind")"; done | xargs"""
)
"""Prints the namespaces of the node's slurmd: name=link."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A row of a table. A value that the table gives as prose is ``None``: any value."""

    attribute: str
    without: str | None
    with_option: str | None


def documented(heading: str) -> dict[str, Difference]:
    """Return the rows of the table below a heading of docs/spank.md."""
    section = PAGE.read_text().partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    rows = [re.split(r" (?<!\\)\| ", line.strip("| \n")) for line in section.splitlines() if line.startswith("| `")]
    result = [Difference(_code(row[0]) or "", _code(row[1]), _code(row[2])) for row in rows]
    return {row.attribute: row for row in result}


def _code(cell: str) -> str | None:
    match = re.fullmatch(r"`([^`]*)`", cell.strip())
    return match[1] if match else None


def check(heading: str, without: Mapping[str, str], with_option: Mapping[str, str]) -> None:
    """Compare the differences of two jobs with the table: none is missing in it, none is too many, values agree."""
    table = documented(heading)
    names = {name for name in without.keys() | with_option.keys() if without.get(name) != with_option.get(name)}
    shown = {name: (without.get(name), with_option.get(name)) for name in sorted(names ^ table.keys())}
    assert not shown, "differences of the jobs and of docs/spank.md"
    for name, row in table.items():
        for expected, measured in ((row.without, without.get(name)), (row.with_option, with_option.get(name))):
            assert expected in {None, measured or "not set"}, f"{name}: {measured!r}"


def test_attributes_differ_as_documented(cluster: Cluster) -> None:
    """Limits, scheduling, credentials, keyrings, namespaces, mounts, descriptors, tracing, core dumps, environment."""
    nodes = cluster.shell("c1", NAMESPACES).strip()
    script = (PROGRAMS / "job_attributes.py").read_text()
    pair = submit_pair(cluster, script, *PLACE, "--job-name=same", f"--export=ALL,HOST_NAMESPACES={nodes}")
    ends = outcomes(cluster, pair)
    assert ends[0] == ends[1]
    without, with_option = (json.loads(cluster.output(job)) for job in pair.both)
    assert len(without) > 150
    check("Attributes", without, with_option)


@dataclass(frozen=True, slots=True)
class Ending:
    """What happens to a job that records its signals. JOB stands for its ID."""

    commands: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    script_ends: bool = False
    awaited: str = ""
    """A signal that the script gets before the commands are run."""


ENDINGS = {
    "warning": Ending(("scancel JOB",), ("--signal=B:USR1@60", "--time=2"), awaited="SIGUSR1"),
    "limit": Ending(("scontrol update jobid=JOB timelimit=0:05",), ("--time=5",)),
    "requeue": Ending(("scontrol requeue JOB",), ("--requeue",)),
    "scancel": Ending(("scancel JOB",)),
    "steps": Ending(("scancel --signal=USR1 JOB; sleep 1; scancel --full --signal=KILL JOB",)),
    "batch": Ending(("scancel --batch --signal=USR1 JOB; sleep 1; scancel JOB",)),
    "full": Ending(("scancel --full --signal=USR2 JOB; sleep 1; scancel JOB",)),
    "suspend": Ending(
        ("scontrol suspend JOB; sleep 1; scontrol resume JOB; sleep 3; scancel --full --signal=KILL JOB",)
    ),
    "end": Ending(script_ends=True),
}


@pytest.mark.slow
@pytest.mark.timeout(600, func_only=True)
def test_signals_arrive_as_documented(cluster: Cluster) -> None:
    """The same processes get the same signals, also at the end; senders are as documented."""
    pairs = {}
    for name, ending in ENDINGS.items():
        pairs[name] = _submit(cluster, ending)
        for job in pairs[name].both:
            processes = PROCESSES[ending.script_ends :]
            wait_until(
                f"the processes of job {job} record signals",
                lambda job=job: _recorded(cluster, job),  # type: ignore[misc]
                lambda result, processes=processes, ending=ending: (  # type: ignore[misc]
                    result.keys() == {*processes} and all(ending.awaited in result[item] for item in processes[:1])
                ),
                timeout_s=150,
            )
        for job in pairs[name].both:
            for command in ending.commands:
                cluster.shell("login", command.replace("JOB", job), user="root")
    outcome: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for name, pair in pairs.items():
        ends = outcomes(cluster, pair)
        assert ends[0] == ends[1]
        for job, signals in zip(pair.both, outcome, strict=True):
            for process, text in _recorded(cluster, job).items():
                # In no order: of those pending at once, the program gets the lowest number first.
                signals[f"{name}_{process}"] = ", ".join(
                    sorted(word.partition(" from ")[0] for word in text.split(", "))
                )
                senders = {word.partition(" from ")[2] for word in text.split(", ")} | {
                    *signals.get("sender", "").split(", ")
                }
                signals["sender"] = ", ".join(sorted(senders - {""}))
    assert "SIGTERM" in outcome[0]["scancel_script"]
    check("Signals", *outcome)


def _submit(cluster: Cluster, ending: Ending) -> Pair:
    """Submit the program that records signals, without and with the option."""
    program = (PROGRAMS / "job_signals.py").read_text()
    argv = ("sh", "-c", 'cat >slurm-signals.py.out && exec sbatch "$@"', "sbatch", "--parsable", "--partition=gpu")
    script = ("slurm-signals.py.out", *(("end",) if ending.script_ends else ()))
    jobs = [
        cluster.exec("login", *argv, *ending.options, *option, *script, user="alice", stdin=program).strip()
        for option in ((), (OPTION,))
    ]
    return Pair(*jobs)


def _recorded(cluster: Cluster, job: str) -> dict[str, str]:
    """Return the signals that each process of a job has recorded so far."""
    prefix = f"/home/alice/slurm-signals-{job}-"
    script = 'for file in "$1"*; do [ -e "$file" ] && echo "$file:$(paste -sd, "$file")"; done; true'
    rows = (
        line.removeprefix(prefix).partition(".out:") for line in cluster.shell("login", script, prefix).splitlines()
    )
    return {name: signals.removeprefix("ready").strip(",").replace(",", ", ") for name, _, signals in rows}
