"""The table of open files of an image, parsed and rewritten."""

from __future__ import annotations

import contextlib
import os
import stat

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_affinode.checkpoint.files import file_table
from slurm_affinode.checkpoint.files.file_table import (
    READ,
    SEARCH,
    WRITE,
    FileTable,
    Needs,
    RemapKind,
    needs,
    packets,
    remaps,
)
from slurm_affinode.checkpoint.image.criu_images import BadImage, bodies, message

from .. import criu_files as made

SHARED = 1 << 7
MEMFD = 1 << 14
BY_PLUGIN = 1 << 27
TABLE = made.image(
    made.root(1),
    made.regular(2, "/home/a/out", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW, stat.S_IFREG | 0o644),
    made.regular(3, "/lib/x.so", mode=stat.S_IFREG | 0o755, size=9),
    made.regular(4, "/home/a/fifo", os.O_RDWR, stat.S_IFIFO | 0o600),
    made.fifo(5, 4),
    made.regular(6, "/dev/pts/3", os.O_RDWR, stat.S_IFCHR | 0o620),
    made.terminal(7, 6),
    made.unix(8, b"/tmp/s\0", extra=((13, made.message((1, 0o140640), (2, 1), (3, 1))), (14, b"/home/a"), (15, 1))),
    made.unix(9, b"\0abstract\0x"),
    made.inotify(10, (0x801, 77, "/home/a"), (0x802, 78, None)),
)


def test_table_names_files_sockets_terminals_and_watches() -> None:
    table = FileTable.parse(TABLE)
    assert {item.id: item.name for item in table.regular.values()} == {
        1: "/", 2: "/home/a/out", 3: "/lib/x.so", 4: "/home/a/fifo", 6: "/dev/pts/3",
    }  # fmt: skip
    assert [figure.key for figure in table.regular.values()][:2] == [".", "home/a/out"]
    assert (table.regular[3].mode, table.regular[3].size) == (stat.S_IFREG | 0o755, 9)
    assert table.regular[2].size is None
    assert table.fifos == {5: 4}
    assert table.terminals == {6}
    named, abstract = table.sockets
    assert (named.path, named.directory, named.deleted, named.mode) == ("/tmp/s", "/home/a", True, 0o140640)  # noqa: S108
    assert (abstract.path, abstract.name) == (None, b"\0abstract\0x")
    assert [(watch.device, watch.inode, watch.path) for watch in table.watches] == [
        (0x801, 77, "/home/a"),
        (0x802, 78, None),
    ]


def test_rewritten_table_has_no_path_of_the_user() -> None:
    """Files are inherited by new names, sockets have none, and all else is unchanged."""
    table = FileTable.parse(TABLE)
    data = table.rewritten({1: "/~a", 2: "/~b", 3: "/~c", 4: "/~d"}, [8])
    for name in (b"/home/a/out", b"/lib/x.so", b"/home/a/fifo", b"/tmp/s"):
        assert name not in data
    assert b"\0abstract\0x" in data
    entries = [message(body) for body in bodies(data)]
    files = [message(entry[3][0]) for entry in entries if 3 in entry]  # type: ignore[arg-type]
    assert [(file[6], file.get(9)) for file in files] == [
        ([b"/~a"], [1]), ([b"/~b"], [1]), ([b"/~c"], [1]), ([b"/~d"], [1]), ([b"/dev/pts/3"], None),
    ]  # fmt: skip
    assert files[1][2] == [os.O_WRONLY | os.O_APPEND]
    first, second = (message(entry[16][0]) for entry in entries if 16 in entry)  # type: ignore[arg-type]
    assert (first[11], first[6], first[8]) == ([b""], [4], [0])
    assert not first.keys() & {13, 14, 15}
    assert second == message(message(list(bodies(TABLE))[8])[16][0])  # type: ignore[arg-type]
    untouched = [body for body in bodies(TABLE) if message(body)[1] in ([3], [8], [11])]
    assert [body for body in bodies(data) if message(body)[1] in ([3], [8], [11])] == untouched


@pytest.mark.parametrize("flag", [os.O_TRUNC, os.O_CREAT, os.O_EXCL, os.O_TMPFILE & ~os.O_DIRECTORY])
def test_flags_that_change_a_file_are_not_passed_to_criu(flag: int) -> None:
    """No open file has them, but an image of a compromised node may: root would empty a file that its user can read."""
    kept = os.O_RDONLY | os.O_APPEND | os.O_NONBLOCK | os.O_DIRECT | os.O_DIRECTORY | os.O_PATH
    table = FileTable.parse(made.image(made.regular(2, "/etc/passwd", kept | flag)))
    (body,) = bodies(table.rewritten({2: "/~b"}))
    assert message(message(body)[3][0])[2] == [kept]  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", [made.message((1, 10), (2, 5)), made.network(5, 3)], ids=["packet", "raw"])
def test_socket_that_only_root_may_open_is_refused(entry: bytes) -> None:
    """CRIU would open it as root for any user: it could read the network traffic of others."""
    with pytest.raises(file_table.NotRestored, match="not restored"):
        FileTable.parse(made.image(entry))


@pytest.mark.parametrize("status", [1 << 10, 1 << 11], ids=["System V", "packet socket"])
def test_mapping_that_only_root_may_make_is_refused(status: int) -> None:
    """CRIU would attach System V shared memory of any user by its number."""
    table = FileTable.parse(made.image(made.root(1)))
    with pytest.raises(BadImage, match="is not restored"):
        needs(table, descriptors=[], memories=[made.memory(1, made.mapping(1, status=status))], places=[])


def test_network_sockets_are_accepted() -> None:
    for kind in (1, 2):
        assert FileTable.parse(made.image(made.network(5, kind))).regular == {}


def test_device_files_become_inherited_files() -> None:
    """A descriptor becomes one of a regular file; a mapped device keeps no size, mode or checksum to be compared."""
    mapped = made.message(
        (1, 2),
        (2, os.O_RDWR),
        (3, 0),
        (5, made.OWNER),
        (6, b"/dev/nvidia0"),
        (8, 0),
        (10, stat.S_IFCHR | 0o666),
        (12, 5),
    )
    table = FileTable.parse(
        made.image(made.root(1), made.message((1, 1), (2, 2), (3, mapped)), made.external(3), made.external(4))
    )
    assert table.external == {3, 4}
    data = table.rewritten({2: "/~b", 3: "/~c", 4: "/~d"}, (), {2})
    again = [message(body) for body in bodies(data)]
    assert [(item[1], item[2], 15 in item) for item in again] == [([1], [number], False) for number in (1, 2, 3, 4)]
    files = [message(item[3][0]) for item in again]  # type: ignore[arg-type]
    assert [file[6] for file in files[1:]] == [[b"/~b"], [b"/~c"], [b"/~d"]]
    assert all(file[9] == [1] and file[5] == [made.OWNER] for file in files[1:])
    assert not files[1].keys() & {8, 10, 12}
    assert files[2][2] == [os.O_RDWR]
    assert files[0].keys() >= {10}
    fds = made.descriptors((1, 1), (3, 16), (9, 16))
    assert [message(body)[3] for body in bodies(file_table.with_regular_files(fds, {3}))] == [[1], [1], [16]]


def test_mapped_devices_are_not_listed_as_needs() -> None:
    """They are listed separately, and an external file that is not in the table is refused."""
    table = FileTable.parse(made.image(made.root(1), made.regular(2, "/bin/true"), made.regular(3, "/dev/nvidia0")))
    memory = made.memory(2, made.mapping(3, status=SHARED | BY_PLUGIN, flags=os.O_RDWR))
    assert needs(table, descriptors=[], memories=[memory], places=[]) == {2: Needs(program=True)}
    assert file_table.device_mappings([memory]) == {3}
    with pytest.raises(BadImage, match="there is no file 0x9"):
        needs(table, descriptors=[made.descriptors((9, 16))], memories=[], places=[])
    with pytest.raises(BadImage, match="has the number of an external one"):
        FileTable.parse(made.image(made.root(1), made.external(1)))


def test_accepted_connection_loses_its_name_and_is_not_inherited() -> None:
    """CRIU does not bind it, and would remove the file of that name."""
    data = FileTable.parse(made.image(made.unix(8, b"/tmp/s", state=1, peer=5))).rewritten({})
    (body,) = bodies(data)
    facts = message(message(body)[16][0])  # type: ignore[arg-type]
    assert (facts[11], facts[8], facts[6]) == ([b""], [5], [0])


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (made.message((1, 14), (2, 1)), "of the kind 14"),
        (made.message((1, 12), (2, 1), (14, b"")), "of the kind 12"),
        (made.message((1, 16), (2, 1), (15, b"")), "field 1 is missing"),
        (made.message((1, 99), (2, 1)), "of the kind 99 open"),
        (made.message((1, 1), (2, 1)), "is empty"),
        (made.message((1, 1), (2, 9), (3, made.message((1, 1)))), "numbers of an entry differ"),
        (made.regular(1, "/a") + made.message((3, made.message((1, 1), (6, b"/b")))), "has a field twice"),
        (made.message((1, 1), (2, 1), (3, made.message((1, 1), (2, 0), (6, b"/a"), (6, b"/b")))), "there twice"),
        (made.regular(1, "a"), "is not a path"),
        (made.regular(1, "/a\0b"), "is not a path"),
        (made.message((1, 1), (2, 1), (3, made.message((1, 1), (2, 0), (6, b"/a"), (9, 1)))), "from somewhere else"),
        (made.unix(1, b"/a\0b"), "is not a path"),
        (made.inotify(1, (1, 1, "a")), "is not a path"),
    ],
)
def test_unknown_or_malformed_entry_is_refused(entry: bytes, why: str) -> None:
    """CRIU could interpret it differently."""
    with pytest.raises(BadImage, match=why):
        FileTable.parse(made.image(entry))


def test_duplicate_file_id_is_refused() -> None:
    """CRIU would use one of the two."""
    with pytest.raises(BadImage, match="two files have the number 0x1"):
        FileTable.parse(made.image(made.root(1), made.regular(1, "/a")))


def test_needs_include_every_use() -> None:
    """Uses are descriptors, mappings, the executable, the working directory and the root directory."""
    result = needs(
        FileTable.parse(TABLE),
        descriptors=[made.descriptors((2, 1), (5, 3), (7, 11), (8, 5))],
        memories=[made.memory(3, made.mapping(3, protection=5), made.mapping(3, status=SHARED, flags=os.O_RDWR),
                              made.mapping(99, status=SHARED | MEMFD), made.mapping(99, status=1 << 9))],
        places=[made.places(1, 1)],
    )  # fmt: skip
    assert result == {
        2: Needs(WRITE),
        4: Needs(READ | WRITE),
        3: Needs(READ | WRITE, program=True, executable=True),
        1: Needs(SEARCH, root=True),
    }


@pytest.mark.parametrize(
    ("status", "protection", "access"), [(SHARED, 3, READ | WRITE), (SHARED, 1, READ), (1 << 6, 3, READ)]
)
def test_mapping_without_flags_is_opened_as_criu_does(status: int, protection: int, access: int) -> None:
    """Images of older versions have no flags."""
    area = made.mapping(3, status=status, protection=protection, flags=None)
    result = needs(FileTable.parse(TABLE), descriptors=[], memories=[made.memory(3, area)], places=[])
    assert result[3].access == access


@pytest.mark.parametrize("kind", ["descriptors", "memories", "places"])
def test_use_of_a_missing_file_is_refused(kind: str) -> None:
    uses = {"descriptors": made.descriptors((99, 1)), "memories": made.memory(99), "places": made.places(99, 1)}
    selected = {use: [uses[use]] if use == kind else [] for use in uses}
    with pytest.raises(BadImage, match="there is no file 0x63"):
        needs(FileTable.parse(TABLE), **selected)


def test_removed_files_are_classified_by_kind() -> None:
    """The kind says where the file is now."""
    data = made.image(made.remap(1, 5, 0), made.remap(2, 6, 1), made.remap(3, 7, 2))
    assert [(remap.id, remap.kind, remap.source) for remap in remaps(data)] == [
        (1, RemapKind.LINKED, 5), (2, RemapKind.CONTENTS, 6), (3, RemapKind.PROCFS, 7),
    ]  # fmt: skip
    for bad in (made.remap(1, 5, 3), made.message((1, 1), (2, 1)), made.remap(1, 5, 0) * 2):
        with pytest.raises(BadImage):
            remaps(made.image(bad, made.remap(1, 5, 0)))


def test_packets_name_the_socket_they_are_queued_at() -> None:
    """Their contents are skipped."""
    data = made.HEADER
    for number, contents in ((5, b"abc"), (6, b"")):
        body = made.message((1, number), (2, len(contents)))
        data += len(body).to_bytes(4, "little") + body + contents
    assert list(packets(data)) == [5, 6]
    with pytest.raises(BadImage):
        list(packets(data[:-1]))


PARTS = st.sampled_from(list(bodies(TABLE)))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Draw the table with some bytes changed, or something similar."""
    data = bytearray(made.image(*draw(st.lists(PARTS, max_size=6))))
    for _ in range(draw(st.integers(0, 6))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@settings(max_examples=400)
@given(damaged() | st.binary(max_size=200))
@example(made.HEADER + b"\xff\xff\xff\x7f")
def test_hostile_bytes_raise_only_bad_image(data: bytes) -> None:
    """A table that is accepted can be rewritten, and then has no path."""
    for read in (remaps, lambda item: list(packets(item))):
        with contextlib.suppress(BadImage):
            read(data)
    with contextlib.suppress(BadImage):
        table = FileTable.parse(data)
        names = {number: f"/~{number:x}" for number in table.regular}
        again = FileTable.parse(_without_ext(table.rewritten(names)))
        assert {item.name for item in again.regular.values()} <= set(names.values())
        assert all(socket.path is None for socket in again.sockets)
        with contextlib.suppress(BadImage):
            needs(table, descriptors=[data], memories=[data], places=[data])


def _without_ext(data: bytes) -> bytes:
    """Return the table without the mark of inherited files, which ``parse`` refuses."""
    return made.image(
        *(
            file_table._with(body, {3: file_table._with(message(body)[3][0], {9: 0})})  # type: ignore[arg-type]
            if message(body)[1][0] == 1
            else body
            for body in bodies(data)
        )
    )
