"""Record the state that an earlier commit leaves behind: ``python record.py OUT`` in a tree of that commit (README.md).

Writes ``suspensions.json``, the files of a simulated cluster whose agent was killed before each of its effects, and
``database.sql``, a dump of the SQLite database.
"""

# ruff: noqa: E402, I001 - modules of the earlier commit, with an owner of the job
from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

UID = 65534
os.getuid = os.getgid = lambda: UID  # the owner of the simulated job

import agent_world
import inplace_site
from agent_site import STEPS, SUBMIT, Crash, Node, World

from slurm_affinode.checkpoint.image_writer import ImageWriter
from slurm_affinode.checkpoint.signatures import Signer
from slurm_affinode.core.policy import Waiting
from slurm_affinode.suspension.promises import Promises

SACCT = Path("slurm_affinode/demo/recording/sacct.txt")
LINES = 8


leave = ImageWriter.__exit__


def stop(self: ImageWriter, *raised: Any) -> None:
    """A killed process removes nothing, but its locks are released."""
    if raised[0] is Crash:
        self.leave()
    else:
        leave(self, *raised)


ImageWriter.__exit__ = stop


def state(world: World) -> dict[str, Any]:
    """Return the site and the files of its nodes and of the shared store."""
    site = asdict(world)
    kept = ("state", "node", "restarts", "held", "comment", "clock")
    files = {
        str(path.relative_to(world.root)): path.read_bytes().decode("utf-8")
        for path in sorted(world.root.rglob("*")) if path.is_file() and path.stat().st_size
    }  # fmt: skip
    return {"site": {name: site[name] for name in kept}, "nodes": site["nodes"], "files": files}


def running(root: Path) -> World:
    """Return a site with a job that runs on node c1."""
    world = World(root, {"c1": Node("c1"), "c2": Node("c2")}, clock=SUBMIT.timestamp() + 60)
    world.start_run("c1")
    world.start_script("c1", STEPS)
    return world


def asleep(root: Path) -> World:
    """Return a site with a job that sleeps in place."""
    world = running(root)
    inplace_site.Node(world).sleep()
    return world


def suspended(root: Path, crash_at: int | None) -> World:
    """Return a site with a job that is suspended on node c1, or whose agent was killed before that effect."""
    world = running(root)
    world.crash_at = crash_at
    agent = agent_world.Agent(world, "c1")
    try:
        agent.suspend()
    except Crash:
        return world
    agent.settle()
    return world


def restored(root: Path, crash_at: int | None) -> World:
    """Return a site where the job is restored on node c2, or whose agent was killed before that effect."""
    world = suspended(root, None)
    world.nodes["c1"].init = None
    world.start_run("c2")
    world.effects, world.crash_at = 0, crash_at
    with contextlib.suppress(Crash):
        agent_world.Agent(world, "c2").restore()
    return world


def promise(root: Path) -> dict[str, str]:
    """Return the file of a promise that lasts a hundred years."""
    held = Promises(root, "alpha", Signer(agent_world.KEY, "c1"), lasts_s=36500 * 86400.0, now=lambda: 1_763_632_800.0)
    name = held.take(Waiting(8, "8", ("gpu",), None, held=False, priority=1, gpus=1), 1)
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file() and name}


def database(directory: Path, ledger: Path) -> str:
    """Return the dump of a database with accounting and the ledger of suspensions."""
    directory.mkdir()
    (directory / "sacct.txt").write_text("".join(SACCT.read_text().splitlines(keepends=True)[:LINES]))
    shutil.copytree(ledger, directory / "ledger")
    program = [sys.executable, "-c", "from slurm_affinode.cli.entry import main; main()"]
    for words in (["ingest", "sacct", "sacct.txt"], ["ingest", "suspensions", "ledger"]):
        subprocess.run([*program, *words, "--state", "."], check=True, cwd=directory)
    return "\n".join(sqlite3.connect(directory / "affinode.sqlite").iterdump()) + "\n"


def main(out: Path) -> None:
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        for number in range(1, 6):
            cases[f"suspend-{number}"] = state(suspended(root / f"suspend-{number}", number))
        cases["suspended"] = state(suspended(root / "suspended", None))
        for number in range(1, 4):
            cases[f"restore-{number}"] = state(restored(root / f"restore-{number}", number))
        cases["asleep-in-place"] = state(asleep(root / "in-place"))
        last = restored(root / "restored", None)
        value = {"uid": UID, "cases": cases, "promise": promise(root / "promise")}
        (out / "suspensions.json").write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
        (out / "database.sql").write_text(database(root / "state", last.root / "shared" / "ledger"))


main(Path(sys.argv[1]))
