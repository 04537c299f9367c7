"""Whether the files of an image are those that its manifest lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from slurm_affinode.checkpoint import digest, packing, rootdir
from slurm_affinode.checkpoint.interface import ImageDamaged
from slurm_affinode.checkpoint.writer import CRIU, MANIFEST, SIGNATURE
from slurm_affinode.model.suspension import FileFact, Manifest


def same_files(fd: int, criu_fd: int, facts: Manifest) -> None:
    """No file is missing, none is there in addition. Raises ``ImageDamaged``."""
    here = {name for name in rootdir.names(fd) if name not in (CRIU, MANIFEST, SIGNATURE)}
    here |= {f"{CRIU}/{name}" for name in rootdir.names(criu_fd)}
    listed = {_form(fact, here) for fact in facts.files}
    if missing := listed - here:
        raise ImageDamaged(f"{min(missing)}: is missing")
    if extra := here - listed:
        raise ImageDamaged(f"{min(extra)}: does not belong there")


def _form(fact: FileFact, here: set[str]) -> str:
    """The name that a file has: that of its compressed form where that alone is there."""
    packed = fact.path + packing.SUFFIX
    return packed if fact.size >= packing.LEAST and fact.path not in here and packed in here else fact.path


def same_contents(fd: int, criu_fd: int, facts: Manifest, owner: int, progress: Callable[[int], None] | None) -> None:
    """Each file is a regular one, its owner's alone, of the size and digest listed.

    Raises ``ImageDamaged``, and ``CheckpointError`` where this node cannot make such digests.
    """
    kind = digest.named(facts.digest)
    packed = {at: {name for name in rootdir.names(at) if name.endswith(packing.SUFFIX)} for at in (fd, criu_fd)}
    with digest.pool() as executor:

        @contextmanager
        def reading(fact: FileFact) -> Iterator[digest.Reading]:
            at, name = (criu_fd, fact.path[len(CRIU) + 1 :]) if "/" in fact.path else (fd, fact.path)
            if fact.size >= packing.LEAST and name + packing.SUFFIX in packed[at]:
                size = packing.packed_size(fact.size)
                with rootdir.file(at, name + packing.SUFFIX, owner=owner, size=size) as opened:
                    numbers = range(digest.count(fact.size))
                    yield digest.Reading(
                        fact.size, [executor.submit(packing.block, kind, opened, n, fact.size) for n in numbers]
                    )
                return
            with rootdir.file(at, name, owner=owner, size=fact.size) as opened:
                yield digest.begin(kind, opened, fact.size, executor)

        made = digest.of_files(kind, map(reading, facts.files), progress)
        with closing(made):
            for fact, found in zip(facts.files, made, strict=True):
                if found != fact.digest:
                    raise ImageDamaged(f"{fact.path}: its contents have changed")
