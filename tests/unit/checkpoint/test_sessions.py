"""Sessions that nobody leads are given up in a dump, so that CRIU restores every process in its place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_affinode.checkpoint.criu_images import BadImage, records
from slurm_affinode.checkpoint.interface import DumpFailed
from slurm_affinode.checkpoint.sessions import Process, adopted, misplaced, settle, unled

HEADER = b"CRIUPSTR"
Row = tuple[int, int, int, int]
"""Process, parent, group, session."""
Fields = Mapping[int, list[int | bytes]]


def varint(value: int) -> bytes:
    """As protobuf writes numbers."""
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def entry(row: Row) -> bytes:
    """As CRIU writes a process: with its threads, the second of them packed."""
    fields = [(number, value) for number, value in enumerate((*row, row[0]), 1)]
    body = b"".join(varint(number << 3) + varint(value) for number, value in fields)
    body += bytes([5 << 3 | 2, 2]) + varint(1000)
    return len(body).to_bytes(4, "little") + body


@pytest.fixture
def dump(tmp_path: Path) -> Iterator[Callable[..., list[Fields]]]:
    """Writes a dump of these processes, settles it; the rows of the tree then."""
    fd = os.open(tmp_path, os.O_RDONLY)

    def make(*rows: Row, zombies: tuple[int, ...] = ()) -> list[Fields]:
        (tmp_path / "pstree.img").write_bytes(HEADER + b"".join(map(entry, rows)))
        for pid, *_ in rows:
            if pid not in zombies:
                (tmp_path / f"mm-{pid}.img").touch()
        settle(fd)
        data = (tmp_path / "pstree.img").read_bytes()
        assert data.startswith(HEADER)
        assert not (tmp_path / "pstree.img.new").exists()
        return list(records(data))

    yield make
    os.close(fd)


def sessions(found: list[Fields]) -> list[int | bytes]:
    """Of each process."""
    return [one[4][0] for one in found]


def test_a_daemon_that_forked_twice_comes_into_the_session_of_the_script(dump: Callable[..., list[Fields]]) -> None:
    """With its children; process groups, threads and numbers are as they were, and so is every other session."""
    rows = ((2, 0, 2, 2), (9, 2, 300, 300), (10, 9, 300, 300), (11, 9, 11, 11), (12, 2, 2, 2))
    found = dump(*rows)
    assert sessions(found) == [2, 2, 2, 11, 2]
    assert [tuple(one[number][0] for number in (1, 2, 3)) for one in found] == [row[:3] for row in rows]
    assert [one[5] for one in found] == [[pid, varint(1000)] for pid, *_ in rows]


def test_a_leader_that_nobody_has_reaped_leads_nothing(dump: Callable[..., list[Fields]]) -> None:
    """It is a zombie below a script that waits for nobody; its group is in one session, so it comes along."""
    assert sessions(dump((2, 0, 2, 2), (8, 2, 8, 8), (9, 2, 8, 8), zombies=(8,))) == [2, 2, 2]


def test_a_daemon_of_a_session_that_is_led_comes_below_its_leader(dump: Callable[..., list[Fields]]) -> None:
    """With session and group as they were: a helper of CRIU's would leave it to PID 1, outside of what is dumped next.

    Its record stands behind that of the leader, who may have come later, with all that is below it.
    """
    found = dump((2, 0, 2, 2), (9, 2, 8, 8), (11, 9, 8, 8), (8, 2, 8, 8), (10, 8, 8, 8), (12, 2, 2, 2))
    assert [tuple(one[number][0] for number in (1, 2, 3, 4)) for one in found] == [
        (2, 0, 2, 2), (8, 2, 8, 8), (9, 8, 8, 8), (11, 9, 8, 8), (10, 8, 8, 8), (12, 2, 2, 2),
    ]  # fmt: skip
    assert found[2][5] == [9, varint(1000)]


def test_a_zombie_of_such_a_session_comes_below_its_leader_too(dump: Callable[..., list[Fields]]) -> None:
    """The script has not reaped it. Members that are below their leader already stay where they are."""
    rows = ((2, 0, 2, 2), (8, 2, 8, 8), (10, 8, 8, 8), (9, 2, 8, 8))
    assert [(one[1][0], one[2][0]) for one in dump(*rows, zombies=(9,))] == [(2, 0), (8, 2), (10, 8), (9, 8)]


def test_a_root_that_leads_no_session_is_left_alone(dump: Callable[..., list[Fields]]) -> None:
    """Its session is not in the tree."""
    assert sessions(dump((2, 0, 2, 1), (9, 2, 7, 7))) == [1, 7]


def test_what_criu_would_not_restore_fails_the_dump(dump: Callable[..., list[Fields]]) -> None:
    """A process that an inner reaper took in from a session beside it; the job then runs on."""
    with pytest.raises(DumpFailed, match=r"process 9 is in session 8, which is not led by a process above it"):
        dump((2, 0, 2, 2), (7, 2, 7, 7), (9, 7, 8, 8), (8, 2, 8, 8))


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 0, 1, 1), (5, 1, 5, 9), (6, 5, 6, 9), (5, 6, 5, 9)],
        [(1, 0, 1, 1), (5, 6, 5, 5)],
        [(1, 0, 1, 1), (5, 0, 5, 5)],
        [(1, 1, 1, 1)],
    ],
    ids=["circle", "no-parent", "two-roots", "own-parent"],
)
def test_processes_that_are_no_tree_are_refused(dump: Callable[..., list[Fields]], rows: list[Row]) -> None:
    """Each once, below one that stands before it: going up would not come to an end otherwise."""
    with pytest.raises(BadImage, match="is there twice, or has no parent"):
        dump(*rows)


def test_a_process_is_born_in_one_session() -> None:
    """A parent can have forked in the session that it was born in and in its own, and in no third one."""
    tree = [Process(2, 0, 2), Process(5, 2, 5), Process(6, 5, 6), Process(7, 6, 5)]
    assert misplaced(tree) is None
    assert misplaced([*tree, Process(8, 6, 2)]) == Process(8, 6, 2)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (HEADER + entry((2, 0, 2, 2))[:-1], "cut short"),
        (HEADER + b"\x02\0\0\0\x08\x02", "field 2 is missing"),
        (None, "No such file"),
    ],
)
def test_a_tree_that_is_not_whole_is_seen(tmp_path: Path, data: bytes | None, why: str) -> None:
    """It is not written anew."""
    if data is not None:
        (tmp_path / "pstree.img").write_bytes(data)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(BadImage, match=why):
            settle(fd)
    finally:
        os.close(fd)


@st.composite
def trees(draw: st.DrawFn) -> list[Process]:
    """Any tree below a root that leads its session, with any sessions."""
    pids = list(range(2, draw(st.integers(3, 12))))
    found = [Process(2, 0, 2)]
    for pid in pids[1:]:
        parent = draw(st.sampled_from([one.pid for one in found]))
        session = draw(st.one_of(st.just(pid), st.sampled_from([*pids, 50, 51])))
        found.append(Process(pid, parent, session, draw(st.booleans()) and pid % 3 == 0))
    return found


@given(trees())
def test_nobody_is_in_a_session_without_a_leader_afterwards(tree: list[Process]) -> None:
    """The root's session is led, so one round is enough."""
    lost = unled(tree)
    assert 2 not in lost
    after = [Process(one.pid, one.parent, 2 if one.session in lost else one.session, one.zombie) for one in tree]
    assert unled(after) == frozenset()
    misplaced(after)
    misplaced(adopted(after))


CROSSED = [Process(2, 0, 2), Process(3, 2, 6), Process(5, 2, 7), Process(6, 5, 6), Process(7, 3, 7)]
"""Two children of the root, each in a session that is led below the other one."""


@given(trees())
@example(CROSSED)
def test_nobody_is_lost_where_children_change_their_parents(tree: list[Process]) -> None:
    """Each process is there once, behind its parent, in its session."""
    after = adopted(tree)
    assert sorted((one.pid, one.session) for one in after) == [(one.pid, one.session) for one in tree]
    seen = {0}
    for one in after:
        assert one.parent in seen
        seen.add(one.pid)
