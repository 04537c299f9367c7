"""The first process of a restored tree gets no signal when CRIU, its first parent, ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.criu import kernel_states
from slurm_affinode.checkpoint.image.criu_images import BadImage, image_records, integer, message
from slurm_affinode.checkpoint.image.private_image import PrivateImage

from .. import criu_files

SIGNAL = 8


def core(signal: int | None) -> bytes:
    """Return the core file of a thread."""
    thread = criu_files.message((1, 4096), (2, 24), *([] if signal is None else [(SIGNAL, signal)]), (11, 0))
    return criu_files.image(criu_files.message((1, 1), (3, b""), (5, thread)))


@pytest.fixture
def image(tmp_path: Path) -> Iterator[PrivateImage]:
    """Yield an image of a process 5001 with threads 5001 and 5002, and a child 5003."""
    root = criu_files.message((1, 5001), (2, 0), (3, 5001), (4, 5001), (5, 5001), (5, 5002))
    child = criu_files.message((1, 5003), (2, 5001), (3, 5001), (4, 5001), (5, 5003))
    (tmp_path / "pstree.img").write_bytes(criu_files.image(root, child))
    for number, signal in {5001: 9, 5002: 10, 5003: 15}.items():
        (tmp_path / f"core-{number}.img").write_bytes(core(signal))
    fd = os.open(tmp_path, os.O_RDONLY)
    yield PrivateImage(tmp_path, fd, fd, {}, shared=False)
    os.close(fd)


def signals(image: PrivateImage) -> dict[int, int]:
    """Return the signal of each thread; 0: none."""
    result = {}
    for number in (5001, 5002, 5003):
        (thread,) = next(image_records(image.fd, f"core-{number}.img"))[5]
        assert isinstance(thread, bytes)
        result[number] = integer(message(thread), SIGNAL, 0)
    return result


def test_signals_of_first_process_are_removed(image: PrivateImage) -> None:
    """Those of all of its threads, and of no other process."""
    assert signals(image) == {5001: 9, 5002: 10, 5003: 15}
    kernel_states.clear_death_signals(image)
    assert signals(image) == {5001: 0, 5002: 0, 5003: 15}
    assert image.read("core-5001.img") == core(None)


def test_image_without_signals_is_unchanged(image: PrivateImage) -> None:
    kernel_states.clear_death_signals(image)
    before = {name: os.stat(name, dir_fd=image.fd).st_ino for name in image.names()}
    kernel_states.clear_death_signals(image)
    assert {name: os.stat(name, dir_fd=image.fd).st_ino for name in image.names()} == before


def test_damaged_image_is_reported(image: PrivateImage) -> None:
    image.replace("core-5002.img", None)
    with pytest.raises(BadImage, match=r"core-5002\.img"):
        kernel_states.clear_death_signals(image)
