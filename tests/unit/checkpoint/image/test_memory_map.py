"""Pages of an image that can be placed by another process than CRIU, and their addresses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.image.criu_images import PAGE, BadImage, inspect
from slurm_affinode.checkpoint.image.memory_map import PageStretch, TreeMemory, fillable

from ..criu.test_criu import HEADER, make_image, record, varint

LAZY, PRESENT = 2, 4
ROOT, CHILD = 7, 8
Entry = tuple[int, int, int]
"""First page, pages, flags."""


def fill(directory: Path, pid: int, entries: Sequence[Entry], mappings: Sequence[tuple[int, int]]) -> None:
    """Write the memory of a process of the image; numbers are pages."""
    areas = b"".join(
        varint(14 << 3 | 2) + varint(len(area)) + area
        for area in (record((1, begin * PAGE), (2, end * PAGE), (7, 0))[4:] for begin, end in mappings)
    )
    body = areas + varint(12 << 3) + varint(1)
    (directory / f"mm-{pid}.img").write_bytes(HEADER + len(body).to_bytes(4, "little") + body)
    rows = record((1, pid)) + b"".join(
        record((1, page * PAGE), (2, count), (4, flags)) for page, count, flags in entries
    )
    (directory / f"pagemap-{pid}.img").write_bytes(HEADER + rows)
    with (directory / f"pages-{pid}.img").open("wb") as file:
        file.truncate(sum(count for _, count, flags in entries if flags & PRESENT) * PAGE)


def tree_memories(directory: Path) -> tuple[TreeMemory, ...]:
    """Return the memory that a restore would fill."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        return fillable(fd, inspect(fd))
    finally:
        os.close(fd)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Return the directory of an image of two processes without lazy pages."""
    make_image(tmp_path)
    for pid in (ROOT, CHILD):
        fill(tmp_path, pid, [(1, 1, PRESENT)], [(0, 9)])
    return tmp_path


def test_image_without_lazy_pages_has_no_memory_to_fill(image: Path) -> None:
    assert tree_memories(image) == ()


def test_runs_end_where_mappings_end(image: Path) -> None:
    """Pages that follow each other in the file need not do so in memory, and may be in one mapping or two."""
    fill(
        image,
        ROOT,
        [(10, 2, LAZY | PRESENT), (12, 3, PRESENT), (15, 9, LAZY), (24, 6, LAZY | PRESENT), (50, 1, LAZY | PRESENT)],
        [(10, 15), (15, 27), (27, 30), (45, 51)],
    )
    root, child = tree_memories(image)
    runs = [(run.offset // PAGE, run.address // PAGE, run.length // PAGE) for run in root.runs]
    assert runs == [(0, 10, 2), (5, 24, 3), (8, 27, 3), (11, 50, 1)]
    assert (root.pid, root.file) == (ROOT, "pages-7.img")
    assert child == TreeMemory(CHILD, "pages-8.img", ())


@pytest.mark.parametrize("mappings", [[], [(0, 10)], [(0, 10), (11, 20)], [(11, 20)]])
def test_pages_in_no_mapping_are_an_error(image: Path, mappings: list[tuple[int, int]]) -> None:
    """CRIU does not write such an image."""
    fill(image, ROOT, [(10, 2, LAZY | PRESENT)], mappings)
    with pytest.raises(BadImage, match="pages at 0xa000 are in no mapping"):
        tree_memories(image)


@pytest.mark.parametrize(
    ("child", "shares"), [((0, 20_000), True), ((1, 20_000), False)], ids=["since a fork", "after an exec"]
)
def test_large_memory_that_processes_may_share_is_left_to_criu(
    image: Path, child: tuple[int, int], shares: bool
) -> None:
    """A mapping of both parent and child may be shared by them; if it is small, that is ignored."""
    fill(image, ROOT, [(5, 19_000, LAZY | PRESENT)], [(0, 20_000)])
    fill(image, CHILD, [(5, 19_000, LAZY | PRESENT)], [child])
    assert (tree_memories(image) == ()) is shares
    fill(image, CHILD, [(5, 100, LAZY | PRESENT)], [child])
    assert [memory.runs for memory in tree_memories(image)] == [
        (PageStretch(0, 5 * PAGE, 19_000 * PAGE),),
        (PageStretch(0, 5 * PAGE, 100 * PAGE),),
    ]


def test_memory_in_too_many_pieces_is_left_to_criu(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that uses every other page would cost the agent a twentieth of its own size."""
    fill(image, ROOT, [(at, 1, LAZY | PRESENT) for at in range(0, 20, 2)], [(0, 20)])
    assert len(tree_memories(image)[0].runs) == 10
    monkeypatch.setattr("slurm_affinode.checkpoint.image.memory_map._MOST_RUNS", 9, raising=False)
    assert tree_memories(image) == ()


def test_zombie_has_no_memory(image: Path) -> None:
    """It has no files in the image."""
    fill(image, ROOT, [(10, 2, LAZY | PRESENT)], [(10, 12)])
    for name in ("mm", "pagemap", "pages"):
        (image / f"{name}-{CHILD}.img").unlink()
    assert [memory.pid for memory in tree_memories(image)] == [ROOT]
