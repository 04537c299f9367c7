"""Sessions without a leader are changed in the dump so that CRIU can restore every process at its place in the tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_affinode.checkpoint.criu.sessions import SessionProcess, adopted, misplaced, settle, take_back, unled
from slurm_affinode.checkpoint.image.criu_images import BadImage, encoded, framed, integer, records
from slurm_affinode.checkpoint.interface import DumpFailed

HEADER = b"CRIUPSTR"
Row = tuple[int, int, int, int]
"""Process, parent, group, session."""
Fields = Mapping[int, list[int | bytes]]


def varint(value: int) -> bytes:
    """Return the number as protobuf encodes it."""
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def entry(row: Row) -> bytes:
    """Return a process as CRIU writes it, with two threads."""
    fields = [(number, value) for number, value in enumerate((*row, row[0]), 1)]
    body = b"".join(varint(number << 3) + varint(value) for number, value in fields)
    body += bytes([5 << 3 | 2, 2]) + varint(1000)
    return len(body).to_bytes(4, "little") + body


@pytest.fixture
def dump(tmp_path: Path) -> Iterator[Callable[..., list[Fields]]]:
    """Return a function that writes a dump of these processes, settles it and returns the entries of the tree."""
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


@pytest.mark.parametrize(
    ("terminal", "zombies", "after"),
    [
        pytest.param((5, 6), (), 6, id="its group exists"),
        pytest.param((5, 9), (), 5, id="it has ended"),
        pytest.param((5, 6), (6,), 5, id="it has ended and was not reaped"),
        pytest.param((5, 2), (), 5, id="it is one of another session"),
        pytest.param((5, 9), (5,), 9, id="the leader has ended too"),
        pytest.param((0, 0), (), 0, id="it is the terminal of no session"),
        pytest.param((7, 7), (), 7, id="it is that of a session outside"),
    ],
)
def test_terminal_whose_foreground_group_has_ended_is_that_of_its_shell(
    dump: Callable[..., list[Fields]], tmp_path: Path, terminal: tuple[int, int], zombies: tuple[int, ...], after: int
) -> None:
    """``terminal``: its session and its foreground group."""
    dump((2, 0, 2, 2), (5, 2, 5, 5), (6, 5, 6, 5), zombies=zombies)
    fields = ((1, 3), (2, 5), (6, terminal[0]), (7, terminal[1]), (8, 34816), (11, encoded(1, 33)))
    info = framed(b"".join(encoded(number, value) for number, value in fields))
    (tmp_path / "tty-info.img").write_bytes(HEADER + info + info)
    fd = os.open(tmp_path, os.O_RDONLY)
    take_back(fd)
    os.close(fd)
    data = (tmp_path / "tty-info.img").read_bytes()
    assert data.startswith(HEADER)
    for entry_after in records(data):
        assert integer(entry_after, 7) == after
        assert {number: values[0] for number, values in entry_after.items() if number != 7} == {
            number: value for number, value in fields if number != 7
        }


def test_dump_without_terminals_is_not_changed(dump: Callable[..., list[Fields]], tmp_path: Path) -> None:
    dump((2, 0, 2, 2))
    fd = os.open(tmp_path, os.O_RDONLY)
    take_back(fd)
    os.close(fd)
    assert not (tmp_path / "tty-info.img").exists()


def sessions(messages: list[Fields]) -> list[int | bytes]:
    """Return the session of each process."""
    return [item[4][0] for item in messages]


def test_double_forked_daemon_joins_the_session_of_the_script(dump: Callable[..., list[Fields]]) -> None:
    """Its children join, too; process groups, threads, PIDs and all other sessions are unchanged."""
    rows = ((2, 0, 2, 2), (9, 2, 300, 300), (10, 9, 300, 300), (11, 9, 11, 11), (12, 2, 2, 2))
    result = dump(*rows)
    assert sessions(result) == [2, 2, 2, 11, 2]
    assert [tuple(item[number][0] for number in (1, 2, 3)) for item in result] == [row[:3] for row in rows]
    assert [item[5] for item in result] == [[pid, varint(1000)] for pid, *_ in rows]


def test_zombie_leader_leads_no_session(dump: Callable[..., list[Fields]]) -> None:
    """It is a zombie below a script that does not wait for it. The group must be in one session, so it joins, too."""
    assert sessions(dump((2, 0, 2, 2), (8, 2, 8, 8), (9, 2, 8, 8), zombies=(8,))) == [2, 2, 2]


def test_daemon_of_a_led_session_is_moved_below_its_leader(dump: Callable[..., list[Fields]]) -> None:
    """Session and group are unchanged. A helper of CRIU would leave it to PID 1, outside of the next dump.

    Its entry is placed behind that of the leader, which may have started later, with all its descendants.
    """
    result = dump((2, 0, 2, 2), (9, 2, 8, 8), (11, 9, 8, 8), (8, 2, 8, 8), (10, 8, 8, 8), (12, 2, 2, 2))
    assert [tuple(item[number][0] for number in (1, 2, 3, 4)) for item in result] == [
        (2, 0, 2, 2), (8, 2, 8, 8), (9, 8, 8, 8), (11, 9, 8, 8), (10, 8, 8, 8), (12, 2, 2, 2),
    ]  # fmt: skip
    assert result[2][5] == [9, varint(1000)]


def test_zombie_of_a_led_session_is_moved_below_its_leader(dump: Callable[..., list[Fields]]) -> None:
    """The script has not reaped it. Members that are already below the leader stay where they are."""
    rows = ((2, 0, 2, 2), (8, 2, 8, 8), (10, 8, 8, 8), (9, 2, 8, 8))
    assert [(item[1][0], item[2][0]) for item in dump(*rows, zombies=(9,))] == [(2, 0), (8, 2), (10, 8), (9, 8)]


def test_root_that_leads_no_session_is_unchanged(dump: Callable[..., list[Fields]]) -> None:
    """Its session is not in the tree."""
    assert sessions(dump((2, 0, 2, 1), (9, 2, 7, 7))) == [1, 7]


def test_session_that_criu_cannot_restore_fails_the_dump(dump: Callable[..., list[Fields]]) -> None:
    """A subreaper adopted the process from a sibling session; the job continues to run."""
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
def test_processes_that_form_no_tree_are_refused(dump: Callable[..., list[Fields]], rows: list[Row]) -> None:
    """Each process must occur once, behind its parent; otherwise walking up would not end."""
    with pytest.raises(BadImage, match="is there twice, or has no parent"):
        dump(*rows)


def test_process_in_a_third_session_is_misplaced() -> None:
    """A parent can have forked in the session it was born in and in its own, but in no other."""
    tree = [SessionProcess(2, 0, 2), SessionProcess(5, 2, 5), SessionProcess(6, 5, 6), SessionProcess(7, 6, 5)]
    assert misplaced(tree) is None
    assert misplaced([*tree, SessionProcess(8, 6, 2)]) == SessionProcess(8, 6, 2)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (HEADER + entry((2, 0, 2, 2))[:-1], "cut short"),
        (HEADER + b"\x02\0\0\0\x08\x02", "field 2 is missing"),
        (None, "No such file"),
    ],
)
def test_incomplete_tree_is_detected(tmp_path: Path, data: bytes | None, why: str) -> None:
    if data is not None:
        (tmp_path / "pstree.img").write_bytes(data)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(BadImage, match=why):
            settle(fd)
    finally:
        os.close(fd)


@st.composite
def trees(draw: st.DrawFn) -> list[SessionProcess]:
    """Draw a tree below a root that leads its session, with arbitrary sessions."""
    pids = list(range(2, draw(st.integers(3, 12))))
    result = [SessionProcess(2, 0, 2)]
    for pid in pids[1:]:
        parent = draw(st.sampled_from([process.pid for process in result]))
        session = draw(st.one_of(st.just(pid), st.sampled_from([*pids, 50, 51])))
        result.append(SessionProcess(pid, parent, session, draw(st.booleans()) and pid % 3 == 0))
    return result


@given(trees())
def test_no_process_is_left_in_a_session_without_leader(tree: list[SessionProcess]) -> None:
    """The root's session is led, so one pass is enough."""
    lost = unled(tree)
    assert 2 not in lost
    after = [
        SessionProcess(path.pid, path.parent, 2 if path.session in lost else path.session, path.zombie) for path in tree
    ]
    assert unled(after) == frozenset()
    misplaced(after)
    misplaced(adopted(after))


CROSSED = [
    SessionProcess(2, 0, 2),
    SessionProcess(3, 2, 6),
    SessionProcess(5, 2, 7),
    SessionProcess(6, 5, 6),
    SessionProcess(7, 3, 7),
]
"""Two children of the root, each in a session that is led below the other."""


@given(trees())
@example(CROSSED)
def test_no_process_is_lost_when_parents_change(tree: list[SessionProcess]) -> None:
    """Each process occurs once, behind its parent, in its session."""
    after = adopted(tree)
    assert sorted((process.pid, process.session) for process in after) == [
        (process.pid, process.session) for process in tree
    ]
    seen = {0}
    for path in after:
        assert path.parent in seen
        seen.add(path.pid)
