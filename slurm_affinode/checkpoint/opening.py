"""Opens the tiers that the configuration names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

from slurm_affinode import kerneltext
from slurm_affinode.checkpoint import packing
from slurm_affinode.checkpoint.blockio import Limiter
from slurm_affinode.checkpoint.demand import SharedDemand
from slurm_affinode.checkpoint.facts import available_memory
from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.checkpoint.tier import Tier
from slurm_affinode.checkpoint.tiers import Tiers
from slurm_affinode.nodeconfig import SuspendConfig
from slurm_affinode.patience import NoAnswerError, Patience
from slurm_affinode.sizes import parse_limit, parse_size
from slurm_affinode.tierconfig import TiersConfig


def open_tiers(
    suspend: SuspendConfig,
    key: bytes,
    *,
    create: bool = True,
    demand: SharedDemand | None = None,
) -> Tiers:
    """The tiers of a node, fastest first. ``create``: make directories that are not there; else leave such tiers out.

    Without the memory tier a node works as without its configuration; why it is not there is in ``Tiers.missing``.
    Raises ``CheckpointError`` where another one cannot be used.
    """
    config = suspend.tiers
    quota = None if suspend.budget is None else parse_size(suspend.budget)
    user_quota, user_share = parse_limit(suspend.user_quota)
    owner = os.geteuid()
    tiers: list[Tier] = []
    missing: list[str] = []
    if config.memory is not None and (create or config.memory.exists()):
        try:
            tiers.append(_memory_tier(config, config.memory, key, create=create))
        except CheckpointError as error:
            missing.append(str(error))
    elif config.memory is not None:
        missing.append(f"{config.memory}: is not there")
    places = [("disk", suspend.local_store)]
    if suspend.shared_store is not None:
        places.append(("shared", suspend.shared_store))
    for name, path in places:
        shared = name == "shared"
        # A copy on the node's disk gives way to another user's as soon as it is in the shared store, too.
        open_store = partial(
            DirectoryStore, path, key, quota=quota, user_quota=user_quota, user_share=user_share if shared else None,
            owner=owner, create=create,
        )  # fmt: skip
        try:
            store = _shared(path, open_store, create=create) if shared else _there(path, open_store, create=create)
        except NoAnswerError as error:
            if create:
                raise CheckpointError(f"{path}: {error.strerror}") from None
            missing.append(f"{path}: {error.strerror}")
            continue
        if store is None:
            missing.append(f"{path}: is not there")
            continue
        level = config.compress if shared and packing.zstd() is not None else 0
        tiers.append(Tier(name, store, shared=shared, direct=config.direct, level=level))
    _refuse_one_directory(tiers)
    if config.compress and packing.zstd() is None:
        missing.append("images are not compressed: the Python package zstandard is not installed")
    return Tiers(
        tiers, demand=demand, missing=missing, to_shared=Limiter(_rate(config.copy_rate)),
        ahead=Limiter(_rate(config.pull_rate)),
    )  # fmt: skip


def _refuse_one_directory(tiers: Sequence[Tier]) -> None:
    """``CheckpointError`` where two are the same: what the one lets go of, as the other has a copy, would be gone."""
    for one, other in combinations(tiers, 2):
        if one.store.same_as(other.store):
            for tier in tiers:
                tier.store.close()
            raise CheckpointError(
                f"{one.store.path} and {other.store.path} are one directory: the tiers {one.name} and {other.name}",
                hint="give each of suspend.local_store, suspend.shared_store and suspend.tiers.memory one of its own",
            )


def _memory_tier(config: TiersConfig, path: Path, key: bytes, *, create: bool) -> Tier:
    """The tier in host memory, of which the jobs' reserve is left alone. Raises ``CheckpointError``."""
    reserve = parse_size(config.memory_reserve)
    quota = parse_size(config.memory_size)

    def left() -> int | None:
        found = available_memory()
        return None if found is None else found - reserve

    store = DirectoryStore(path, key, quota=quota, owner=os.geteuid(), create=create)
    # Others of the kernel in memory will not do: a ramfs tells no room, and to a hugetlbfs nothing is written.
    if (kind := filesystem(path)) != "tmpfs":
        store.close()
        raise CheckpointError(f"{path}: is on {kind or 'an unknown file system'}, not on a tmpfs")
    if os.statvfs(path).f_blocks == 0:
        store.close()
        raise CheckpointError(f"{path}: is on a tmpfs without a limit, which tells no room", hint="mount it with size=")
    return Tier("memory", store, durable=False, left=left)


def _there(path: Path, open_store: Callable[..., DirectoryStore], *, create: bool) -> DirectoryStore | None:
    return open_store() if create or path.exists() else None


def _shared(path: Path, open_store: Callable[..., DirectoryStore], *, create: bool) -> DirectoryStore | None:
    """The store on a file system of another machine. Raises ``NoAnswerError``."""
    patience = Patience(path.parent)

    def look() -> DirectoryStore | None:
        if create and not path.parent.is_dir():
            # An empty directory on the node's own disk in its place would be a store without the images of all jobs.
            raise CheckpointError(
                f"{path.parent}: is not there",
                hint=f"mount its file system; if it is new: install -d -m 0700 -o root -g root {path.parent}",
            )
        return _there(path, partial(open_store, patience=patience), create=create)

    return patience(look)


def _rate(text: str | None) -> float:
    return 0.0 if text is None else float(parse_size(text))


def filesystem(path: Path) -> str | None:
    """Type of the file system that a directory is on, as the kernel calls it; ``None``: not known."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        for line in kerneltext.lines("/proc/self/mountinfo"):
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    except (OSError, IndexError):
        pass
    return None
