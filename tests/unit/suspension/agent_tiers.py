"""An agent with three tiers of images."""

from __future__ import annotations

import errno

from agent_site import World
from agent_world import KEY, Agent

from slurm_affinode.agent.composition import report_problem
from slurm_affinode.checkpoint.interface import NoRoom
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.store.retention import Tier
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.model.suspension import Phase


class Tiered(Agent):
    """An agent with an additional tier in host memory."""

    def __init__(self, world: World, node: str, memory: int = 1 << 30) -> None:
        super().__init__(world, node)
        store = DirectoryStore(world.root / node / "memory", KEY, quota=memory)
        tiers = Tiers(
            [Tier("memory", store, durable=False), *self.tiers.tiers], now=world.now,
            report=lambda key, text: report_problem(self.notes, key, text),
        )  # fmt: skip
        self.build(tiers=tiers)

    def where(self) -> list[str]:
        """Return the tiers with the image."""
        return [copy.tier.name for copy in self.tiers._all_copies("alpha.7", 1)]

    def asleep(self) -> str | None:
        """Return the problem that ``status`` shows."""
        (item,) = self.keeper.suspended()
        return item.failure

    def damage(self, tier: str) -> None:
        """Change a byte in a file of the image."""
        store = next(item.store for item in self.tiers.tiers if item.name == tier)
        path = next(
            path for path in sorted((store.path / "alpha.7" / "0001" / "criu").iterdir()) if path.stat().st_size
        )
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)


def asleep(world: World) -> Tiered:
    """Suspend the job on c1, with its image in all tiers."""
    agent = Tiered(world, "c1")
    assert agent.suspend().phase is Phase.QUEUED
    agent.settle()
    assert agent.where() == ["memory", "disk", "shared"]
    return agent


def again_at(world: World, node: str) -> Tiered:
    """Have Slurm start the job again on this node."""
    world.start_run(node)
    if node != "c1":
        world.nodes["c1"].init = None
    return Tiered(world, node)


def read_only(*_: object, **__: object) -> None:
    """Raise the error of a read-only file system."""
    raise OSError(errno.EROFS, "Read-only file system")


def read_only_store(*_: object) -> None:
    """Raise the error of a read-only store."""
    raise NoRoom("shared: is read-only")
