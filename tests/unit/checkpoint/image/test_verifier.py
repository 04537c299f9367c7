"""Verification of an image: pages in the background, all other files before."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from slurm_affinode.base import threads as base_threads
from slurm_affinode.checkpoint.image import digest
from slurm_affinode.checkpoint.image import verifier as image_verifier
from slurm_affinode.checkpoint.interface import CheckpointError, ImageDamaged

from ..conftest import Node


def open_files() -> int:
    """Return the number of open files of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def threads() -> list[str]:
    """Return the names of the threads that verify."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("digest", "verify"))]


def test_changed_pages_are_reported_to_the_waiting_restore(make_node: Callable[..., Node]) -> None:
    """Each call reports it; the image can be used until then. No thread or descriptor is left."""
    node = make_node()
    image = node.dump()
    before = open_files()
    node.flip(node.disk, image)
    with node.disk.verifying(image) as pages:
        for _ in range(2):
            with pytest.raises(ImageDamaged, match=r"123/0001: criu/pages-1.img: its contents have changed"):
                pages.sound()
    with node.memory.verifying(image) as pages:
        pages.sound(60)
        pages.sound(0)
    assert threads() == []
    assert open_files() == before


@pytest.mark.parametrize("what", ["other", "short", "mode", "names", "missing", "link", "extra"])
def test_damage_outside_the_contents_of_pages_is_reported_first(make_node: Callable[..., Node], what: str) -> None:
    """That includes metadata of the files with pages."""
    node = make_node()
    image = node.dump()
    pages = node.file(node.disk, image)
    if what == "other":
        pages.with_name("pstree.img").write_bytes(b"tref")
    elif what == "short":
        os.truncate(pages, 5)
    elif what == "mode":
        pages.chmod(0o644)
    elif what == "names":
        pages.with_name("pages-2.img").hardlink_to(pages)
    elif what == "missing":
        pages.unlink()
    elif what == "link":
        pages.rename(node.disk.path / "elsewhere")
        pages.symlink_to(node.disk.path / "elsewhere")
    else:
        pages.with_name("pages-2.img").write_bytes(b"")
    before = open_files()
    with pytest.raises(ImageDamaged), node.disk.verifying(image):
        raise AssertionError("it was taken for sound")
    assert threads() == []
    assert open_files() == before


class Slow(ThreadPoolExecutor):
    """An executor that reports its shutdown."""

    ends = threading.Event()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Report the shutdown, then shut down."""
        self.ends.set()
        super().shutdown(wait, cancel_futures=cancel_futures)


def test_verification_that_times_out_is_stopped(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout is reported, not damage; only blocks that were begun are digested to their end."""
    node = make_node()
    image = node.dump()
    begun: list[int] = []
    block, started = digest.block, threading.Event()

    def waits(kind: digest.DigestAlgorithm, fd: int, number: int, size: int, piece: digest.Piece | None) -> bytes:
        if size > len(b"tree"):
            begun.append(number)
            started.set()
            assert Slow.ends.wait(60)
        return block(kind, fd, number, size, piece)

    Slow.ends.clear()
    monkeypatch.setattr(digest, "block", waits)
    monkeypatch.setattr(base_threads, "ThreadPoolExecutor", Slow)
    with ExitStack() as stack:
        pages = stack.enter_context(node.disk.verifying(image))
        pages.begin()
        assert started.wait(60)
        with pytest.raises(CheckpointError, match="could not be verified in time") as caught:
            pages.sound(-1)
        assert not isinstance(caught.value, ImageDamaged)
    assert len(begun) <= digest.workers() < digest.count(image.manifest.size)
    assert threads() == []


@pytest.mark.parametrize(
    ("error", "expected", "why"),
    [
        (OSError(errno.EIO, "Input/output error"), ImageDamaged, "cannot be read: Input/output error"),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), ImageDamaged, "cannot be read: Connection timed out"),
        (EOFError(), ImageDamaged, "is not complete"),
        (MemoryError("no memory"), MemoryError, "no memory"),
    ],
)
def test_error_of_a_thread_is_reported(
    make_node: Callable[..., Node],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    expected: type[Exception],
    why: str,
) -> None:
    """Errors of the file system and of the program alike."""
    node = make_node()
    image = node.dump()
    block = digest.block

    def fails(kind: digest.DigestAlgorithm, fd: int, number: int, size: int, piece: digest.Piece | None) -> bytes:
        if number == 1:
            raise error
        return block(kind, fd, number, size, piece)

    monkeypatch.setattr(digest, "block", fails)
    with node.disk.verifying(image) as pages, pytest.raises(expected, match=why):
        pages.sound()
    assert threads() == []


def test_files_with_pages_are_recognized_by_criu_names() -> None:
    """Files that CRIU reads itself are not verified in the background."""
    result = image_verifier._PAGES.fullmatch
    assert all(result(name) for name in ("criu/pages-1.img", "criu/pages-shmem-7.img", "criu/pages-12345.img"))
    others = (
        "criu/pagemap-1.img",
        "pages-1.img",
        "criu/pages-1.img.zst",
        "criu/local-1",
        "out.1",
        "criu/x/pages-1.img",
    )
    assert not any(result(name) for name in others)
