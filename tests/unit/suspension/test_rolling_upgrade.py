"""State that an earlier release has left behind (``tests/data/previous``), and what this one writes for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agent_site
import agent_world
import inplace_site
import pytest
from agent_site import Node, Process, World
from agent_world import KEY, Agent

from slurm_affinode.checkpoint.image import manifest
from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.checkpoint.interface import CudaState
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.model.suspension import Phase
from slurm_affinode.suspension.job.shepherd import Hold, Restored
from slurm_affinode.suspension.records.promises import Promises

from .agent_sequences import begun_at_c2, check, recovered, resume_at_c2

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "previous" / "suspensions.json").read_text())
SUSPENSIONS = [name for name in RECORDED["cases"] if name.startswith("suspend")]
RESTORES = [name for name in RECORDED["cases"] if name.startswith("restore-")]


@pytest.fixture
def left(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], World]:
    """Return a function that gives the site of a case, as the agents of the earlier release have left it."""
    owner = User(RECORDED["uid"], RECORDED["uid"])
    for module in (agent_site, agent_world):
        monkeypatch.setattr(module, "OWNER", owner)

    def build(case: str) -> World:
        recorded = RECORDED["cases"][case]
        for name, text in recorded["files"].items():
            path = world.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for path in world.root.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        for name, value in recorded["site"].items():
            setattr(world, name, value)
        for name, machine in recorded["nodes"].items():
            processes = [
                Process(**{**process, "cuda": None if process["cuda"] is None else CudaState(process["cuda"])})
                for process in machine["processes"]
            ]
            world.nodes[name] = Node(name, machine["init"], processes, machine["next_pid"])
        return world

    return build


@pytest.mark.parametrize("case", SUSPENSIONS)
def test_interrupted_suspension_is_completed_or_rolled_back(left, case):
    """Journal, image, note and ledger of the earlier release; the job resumes on a node with this one."""
    world = left(case)
    recovered(world)
    check(world)
    resume_at_c2(world)


@pytest.mark.parametrize("case", RESTORES)
def test_interrupted_restore_is_repeated(left, case):
    """The claim of the attempt is of the earlier release, too."""
    world = left(case)
    agent = recovered(world, "c2")
    assert agent.restore() == Restored(2)
    check(world)
    assert agent.journal.open_journals() == []


def test_job_asleep_in_place_wakes_with_this_release(left):
    world = left("asleep-in-place")
    node = inplace_site.Node(world)
    node.recover()
    node.agent.registry.put(node.job())
    node.keeper.registered(node.job())
    assert (node.phase(), inplace_site.asleep(world)) == (Phase.FROZEN, True)
    assert node.view()["why"] == "idle 15m"
    node.connection()
    node.round()
    assert inplace_site.awake(world)
    assert node.agent.journal.open_journals() == []


def test_promise_counts(tmp_path):
    """A pending job gets its GPUs from one node, whichever release its agent is of."""
    for name, text in RECORDED["promise"].items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(text)
    promises = Promises(tmp_path, "alpha", Signer(KEY, "c2"), lasts_s=36500 * 86400.0)
    promises.refresh()
    assert [(promise.job_id, promise.node, promise.gpus) for promise in promises.known()] == [(8, "c1", 1)]


def records(text: str) -> list[Any]:
    """Return the values of a JSON document, or of each of its lines."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def covers(new: Any, old: Any, *, exact: bool) -> bool:
    """Return whether ``new`` has all keys of ``old`` with values of the same kinds; ``exact``: and no others."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = new.keys() == old.keys() if exact else new.keys() >= old.keys()
        return keys and all(covers(new[key], value, exact=exact) for key, value in old.items())
    if isinstance(old, list) and isinstance(new, list):
        return len(new) == len(old) and all(covers(a, b, exact=exact) for a, b in zip(new, old, strict=True))
    return new is None or old is None or type(new) is type(old)


def test_earlier_release_finds_what_it_reads(world):
    """It ignores keys that it does not know, except in manifests, and refuses other versions."""
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    for name, text in RECORDED["cases"]["suspended"]["files"].items():
        path = world.root / name
        assert path.exists(), name
        if path.suffix in (".json", ".jsonl"):
            new, old = records(path.read_text()), records(text)
            assert covers(new, old, exact=path.name == "manifest.json"), name
            for key in ("version", "schema"):
                assert [value.get(key) for value in new] == [value.get(key) for value in old], name


@pytest.mark.parametrize("change", [{"schema": 2}, {"option": "window=900,later=1"}, {"later": 1}])
def test_image_of_a_later_release_is_kept(world, change):
    """After a downgrade, its job is held with the reason, and no copy of the image is changed."""
    agent = begun_at_c2(world)
    directory = world.root / "shared" / "images" / "alpha.7" / "0001"
    data = json.dumps({**json.loads((directory / "manifest.json").read_text()), **change}).encode()
    (directory / "manifest.json").write_bytes(data)
    (directory / "manifest.hmac").write_text(manifest.sign(data, KEY, "c1") + "\n")
    files = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert isinstance(agent.restore(), Hold)
    assert (world.state, world.held) == ("PENDING", True)
    assert re.search(r"the manifest (has schema 2, this release reads 1|cannot be read: .*later)", world.comment)
    agent.settle()
    recovered(world, "c2")
    assert {path: path.read_bytes() for path in directory.parent.rglob("*") if path.is_file()} == files
