"""Whether the files of an image are those that its manifest lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from slurm_affinode.checkpoint import digest, rootdir
from slurm_affinode.checkpoint.interface import ImageDamaged
from slurm_affinode.checkpoint.writer import CRIU, MANIFEST, SIGNATURE
from slurm_affinode.model.suspension import FileFact, Manifest


def same_files(fd: int, criu_fd: int, facts: Manifest) -> None:
    """No file is missing, none is there in addition. Raises ``ImageDamaged``."""
    here = {name for name in rootdir.names(fd) if name not in (CRIU, MANIFEST, SIGNATURE)}
    here |= {f"{CRIU}/{name}" for name in rootdir.names(criu_fd)}
    listed = {fact.path for fact in facts.files}
    if missing := listed - here:
        raise ImageDamaged(f"{min(missing)}: is missing")
    if extra := here - listed:
        raise ImageDamaged(f"{min(extra)}: does not belong there")


def same_contents(fd: int, criu_fd: int, facts: Manifest, owner: int, progress: Callable[[int], None] | None) -> None:
    """Each file is a regular one, its owner's alone, of the size and digest listed.

    Raises ``ImageDamaged``, and ``CheckpointError`` where this node cannot make such digests.
    """
    kind = digest.named(facts.digest)
    with digest.pool() as executor:

        @contextmanager
        def reading(fact: FileFact) -> Iterator[digest.Reading]:
            at, name = (criu_fd, fact.path[len(CRIU) + 1 :]) if "/" in fact.path else (fd, fact.path)
            with rootdir.file(at, name, owner=owner, size=fact.size) as opened:
                yield digest.begin(kind, opened, fact.size, executor)

        made = digest.of_files(kind, map(reading, facts.files), progress)
        with closing(made):
            for fact, found in zip(facts.files, made, strict=True):
                if found != fact.digest:
                    raise ImageDamaged(f"{fact.path}: its contents have changed")
