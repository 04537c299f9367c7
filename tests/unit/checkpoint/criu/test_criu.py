"""CRIU: its image files are verified, its log is reduced to one line, and its exit status is not relied on."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_owner import OWNER
from namespace_job import EmptyNamespace

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.pidfd import Id, Process
from slurm_affinode.base.process import Completed
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.criu.criu import Criu, _free_pid, cgroup_files
from slurm_affinode.checkpoint.files import device_files
from slurm_affinode.checkpoint.files.service_connections import ServiceConnection, Services
from slurm_affinode.checkpoint.image.criu_images import PAGE, BadImage, failure, inspect, message, records
from slurm_affinode.checkpoint.interface import CheckpointError, DumpFailed, DumpNoRoom, RestoreFailed, Tree

from .. import criu_files


def varint(value: int) -> bytes:
    """Return the number as protobuf encodes it."""
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def record(*fields: tuple[int, int]) -> bytes:
    """Return a message of numbers, with its length."""
    body = b"".join(varint(number << 3) + varint(value) for number, value in fields)
    return len(body).to_bytes(4, "little") + body


HEADER = b"\0" * 8
ID = Id(12345, 1)


def made(runner: Any) -> Criu:
    """Return a Criu that runs no program, with an empty namespace."""
    return Criu(program="/bin/true", runner=runner, hold=lambda init: EmptyNamespace())  # type: ignore[arg-type,return-value]


def make_image(directory: Path) -> None:
    """Write an image of a root process and its child, as CRIU does."""
    tree = record((1, 7), (2, 0), (3, 7), (4, 7), (5, 7), (5, 9)) + record((1, 8), (2, 7), (3, 8), (4, 300), (5, 8))
    (directory / "inventory.img").write_bytes(HEADER)
    (directory / "pstree.img").write_bytes(HEADER + tree)
    (directory / "files.img").write_bytes(criu_files.image(criu_files.root(1)))
    (directory / "core-9.img").write_bytes(HEADER + record((1, 1)))
    for pid in (7, 8):  # stopped, and without credentials
        body = criu_files.message((1, 1), (3, criu_files.message((1, 3))))
        (directory / f"core-{pid}.img").write_bytes(criu_files.image(body))
    for pid in (7, 8):
        (directory / f"mm-{pid}.img").write_bytes(criu_files.memory(1))
        (directory / f"fs-{pid}.img").write_bytes(criu_files.places(1, 1))
        rows = record((1, pid)) + record((1, 4096), (2, 3), (4, 4)) + record((1, 99999), (2, 5), (4, 2))
        (directory / f"pagemap-{pid}.img").write_bytes(HEADER + rows)
        (directory / f"pages-{pid}.img").write_bytes(bytes(3 * PAGE))


def write_core(directory: Path, pid: int, *, uid: int = OWNER.uid, gid: int = OWNER.gid, groups: bytes = b"") -> None:
    """Write the core of a stopped process with these credentials."""
    ids = ((number, uid if number % 2 else gid) for number in range(1, 9))
    thread = criu_files.message((10, criu_files.message(*ids, (14, groups))))
    (directory / f"core-{pid}.img").write_bytes(
        criu_files.image(criu_files.message((1, 1), (3, criu_files.message((1, 3))), (5, thread)))
    )


class Stops:
    """The stop of a job, with a log of its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def hold(self) -> None:
        self.calls.append("hold")

    def release(self) -> None:
        self.calls.append("release")


@pytest.fixture
def image(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """Return the directory of an image and a descriptor of it."""
    make_image(tmp_path)
    fd = os.open(tmp_path, os.O_RDONLY)
    yield tmp_path, fd
    os.close(fd)


def test_image_facts_are_read(image: tuple[Path, int]) -> None:
    """They are the processes, root first, and all IDs that a restore needs."""
    inspection = inspect(image[1])
    assert inspection.pids == (7, 8)
    assert inspection.numbers == {7, 8, 9, 300}


@pytest.mark.parametrize(
    ("name", "contents", "why"),
    [
        ("inventory.img", None, "inventory.img"),
        ("pstree.img", None, "pstree.img"),
        ("pstree.img", HEADER, "no process"),
        ("pstree.img", b"no", "no header"),
        ("pstree.img", HEADER + record((1, 7), (2, 0))[:-1], "cut short"),
        ("pstree.img", HEADER + record((1, 7), (2, 5), (3, 7), (4, 7)), "has no parent"),
        ("core-8.img", None, "missing or empty"),
        ("mm-7.img", None, "the root process has no memory"),
        ("pages-8.img", b"", "0 bytes in place of 12288"),
        ("pages-8.img", None, "0 bytes in place of 12288"),
        ("pagemap-8.img", HEADER, "empty"),
    ],
)
def test_incomplete_image_is_detected(image: tuple[Path, int], name: str, contents: bytes | None, why: str) -> None:
    path = image[0] / name
    path.unlink() if contents is None else path.write_bytes(contents)
    with pytest.raises(BadImage, match=why):
        inspect(image[1])


def of_namespaces(*fields: tuple[int, int]) -> bytes:
    """Return ``task_kobj_ids_entry``: namespaces are fields 5 to 12."""
    return criu_files.message(*((number, number) for number in range(1, 13)), *fields)


@pytest.mark.parametrize("kind", [5, 6, 7, 9, 10, 11])
def test_image_with_namespaces_is_refused(image: tuple[Path, int], kind: int) -> None:
    """CRIU would create them as root, and mount what the image lists. A time namespace is of every restored tree."""
    path, fd = image
    inventory = criu_files.message((1, 2), (3, of_namespaces()))
    (path / "inventory.img").write_bytes(HEADER[:4] + len(inventory).to_bytes(4, "little") + inventory)
    (path / "ids-7.img").write_bytes(criu_files.image(of_namespaces((1, 3), (12, 4))))
    assert inspect(fd).pids == (7, 8)
    (path / "ids-8.img").write_bytes(criu_files.image(of_namespaces((kind, 20))))
    with pytest.raises(BadImage, match=r"ids-8\.img: a process has a namespace of its own"):
        inspect(fd)


def test_image_with_credentials_in_a_file_of_their_own_is_refused(image: tuple[Path, int]) -> None:
    """CRIU would take them for a process whose other files have none, and they would not be compared."""
    (image[0] / "creds-7.img").write_bytes(criu_files.image(criu_files.message((1, 0))))
    with pytest.raises(BadImage, match=r"creds-7\.img: is of an older version"):
        inspect(image[1])


@pytest.mark.parametrize("twice", ["records", "fields"])
def test_ambiguous_namespaces_are_refused(image: tuple[Path, int], twice: str) -> None:
    path, fd = image
    if twice == "records":
        (path / "ids-7.img").write_bytes(criu_files.image(of_namespaces(), of_namespaces()))
    else:
        inventory = criu_files.message((1, 2), (3, of_namespaces()), (3, of_namespaces()))
        (path / "inventory.img").write_bytes(HEADER[:4] + len(inventory).to_bytes(4, "little") + inventory)
    with pytest.raises(BadImage, match="namespaces"):
        inspect(fd)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_raise_only_bad_image(data: bytes) -> None:
    for read in (message, lambda d: list(records(d))):
        with contextlib.suppress(BadImage):
            read(data)


def test_criu_log_is_reduced_to_one_line() -> None:
    """The first errors have the cause; the last ones only report the failure."""
    log = (
        "(00.002) Warn  (criu/kerndat.c:1): something\n"
        "(00.003) Error (criu/files-ext.c:98): Can't dump file 5 of that type [20666] (chr 195:0 /dev/nvidia0)\n"
        "(00.004) Error (criu/cr-dump.c:1547): Dump files (pid: 7) failed with -1\n"
        "(00.005) Error (criu/cr-dump.c:2098): Dumping FAILED.\n"
    )
    assert failure(log) == (
        "Can't dump file 5 of that type [20666] (chr 195:0 /dev/nvidia0); Dump files (pid: 7) failed with -1"
    )
    assert failure("") == "its log has no error"
    assert "\n" not in failure("     7: Error (criu/x.c:1): File a has bad size 1 (expect 2)\n")


class Program:
    """A fake CRIU."""

    def __init__(self, *, status: int = 0, version: str = "Version: 4.1.1\n", error: Exception | None = None) -> None:
        self.status, self.version, self.error = status, version, error
        self.calls: list[tuple[Sequence[str], dict[str, Any]]] = []

    def __call__(self, argv: Sequence[str], **options: Any) -> Completed:
        """Record the call."""
        if "--version" in argv:
            return Completed(tuple(argv), 0, self.version.encode(), "")
        self.calls.append((argv, options))
        if self.error is not None:
            raise self.error
        return Completed(tuple(argv), self.status, b"", "it broke")


@pytest.mark.parametrize(
    ("version", "why"), [("Version: 3.17\n", "4.1 is needed"), ("Version: 4.0\n", "too old"), ("hello", "no version")]
)
def test_old_criu_is_refused(version: str, why: str) -> None:
    """The error has a hint."""
    with pytest.raises(CheckpointError, match=why) as caught:
        made(Program(version=version)).check()
    assert caught.value.hint is not None


def test_missing_criu_is_refused() -> None:
    with pytest.raises(CheckpointError, match="cannot be run"):
        Criu(program="/nowhere/criu").check()


def test_criu_gets_no_input_chosen_by_a_user(image: tuple[Path, int]) -> None:
    """It gets a fixed environment, no configuration file, no plugins, and directories as descriptors."""
    program = Program()
    with pytest.raises(DumpFailed, match="holds process 7 in place of 5"):
        made(program).dump(Tree(ID, os.getpid(), 5, OWNER), image[1], timeout_s=5, stop=Stops())
    ((argv, options),) = program.calls
    assert argv[1:3] == ["-I", "-S"]
    assert argv[10:12] == ["criu", "dump"]
    assert "--no-default-config" in argv
    assert f"--images-dir=/proc/self/fd/{image[1]}" in argv
    assert any(word.startswith("--libdir=/proc/self/fd/") for word in argv)
    # Users who maintain programs may write to the directories below /usr/local.
    assert options["env"] == {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "HOME": "/"}
    assert options["pass_fds"] == (image[1], int(argv[4]), 0, 0)


def test_plugin_is_loaded_for_forked_workers_only(image: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """From its own directory, with the major numbers of the driver, and only if no other process has a device file."""
    program, current = Program(), Process(os.getpid())
    monkeypatch.setattr(device_files, "majors", lambda: {195, 507})
    monkeypatch.setattr(device_files, "opened", lambda plugin: contextlib.nullcontext(77))
    monkeypatch.setattr(
        device_files, "find_device_file", lambda process, majors: "/dev/nvidia0" if 195 in majors else None
    )
    monkeypatch.setattr(EmptyNamespace, "processes", lambda self: iter([(7, current)]))
    with pytest.raises(DumpFailed, match="holds process 7 in place of 5"):
        made(program).dump(
            Tree(ID, os.getpid(), 5, OWNER, frozenset({current.id})), image[1], timeout_s=5, stop=Stops()
        )
    ((argv, options),) = program.calls
    assert "--libdir=/proc/self/fd/77" in argv
    assert options["env"]["SLURM_AFFINODE_DEVICE_MAJORS"] == "195,507"
    assert {image[1], 77} <= set(options["pass_fds"])
    with pytest.raises(DumpFailed, match="has /dev/nvidia0 open, and has not inherited it"):
        made(program).dump(Tree(ID, os.getpid(), 5, OWNER, frozenset({Id(1, 1)})), image[1], timeout_s=5, stop=Stops())
    assert len(program.calls) == 1


class FakeServices(Services):
    """Every process has one connection."""

    busy = False

    def of(self, process: Process) -> tuple[ServiceConnection, ...]:
        """Return the connection."""
        return (ServiceConnection(71234, "/run/nss", self.busy),)


def test_connections_to_services_are_passed_over(image: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin gets their inodes, and no device numbers; a request in progress fails the dump by name."""
    program, current, services = Program(), Process(os.getpid()), FakeServices()
    monkeypatch.setattr(device_files, "opened", lambda plugin: contextlib.nullcontext(77))
    monkeypatch.setattr(EmptyNamespace, "processes", lambda self: iter([(7, current)]))
    criu = Criu(program="/bin/true", runner=program, services=services, hold=lambda init: EmptyNamespace())  # type: ignore[arg-type,return-value]
    tree = Tree(ID, os.getpid(), 5, OWNER)
    with pytest.raises(DumpFailed, match="holds process 7 in place of 5"):
        criu.dump(tree, image[1], timeout_s=5, stop=Stops())
    ((argv, options),) = program.calls
    assert "--libdir=/proc/self/fd/77" in argv
    assert options["env"]["SLURM_AFFINODE_CLOSED_SOCKETS"] == "71234"
    assert "SLURM_AFFINODE_DEVICE_MAJORS" not in options["env"]
    monkeypatch.setattr(FakeServices, "busy", True)
    with pytest.raises(DumpFailed, match="process 7 has a request to /run/nss in progress"):
        criu.dump(tree, image[1], timeout_s=5, stop=Stops())
    assert len(program.calls) == 1


def test_connection_that_is_not_listed_is_explained(image: tuple[Path, int]) -> None:
    """CRIU's message does not say what to do."""
    (image[0] / "dump.log").write_text(
        "(0.1) Error (criu/sk-unix.c:890): unix: Can't dump half of stream unix connection.\n"
    )
    with pytest.raises(DumpFailed, match=r"UNIX socket outside of the job.*suspend\.services"):
        made(Program(status=1)).dump(Tree(ID, os.getpid(), 7, OWNER), image[1], timeout_s=5, stop=Stops())


def test_failed_dump_reports_the_cause(image: tuple[Path, int]) -> None:
    """The cause is in the log, or else in the output of the program; a dump that times out fails, too."""
    tree = Tree(ID, os.getpid(), 7, OWNER)
    with pytest.raises(DumpFailed, match="it broke"):
        made(Program(status=1)).dump(tree, image[1], timeout_s=5, stop=Stops())
    (image[0] / "dump.log").write_text("(0.1) Error (criu/a.c:1): no luck\n")
    with pytest.raises(DumpFailed, match="no luck"):
        made(Program(status=1)).dump(tree, image[1], timeout_s=5, stop=Stops())
    program = Program(error=UnreachableError("criu: timed out after 5 s"))
    with pytest.raises(DumpFailed, match="was aborted"):
        made(program).dump(tree, image[1], timeout_s=5, stop=Stops())


def test_failed_dump_of_a_job_that_ended_reports_its_end(
    image: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU is killed with the PID namespace of the job, and its log has no error."""
    monkeypatch.setattr(Process, "ended", lambda self: True)
    with pytest.raises(DumpFailed, match="could not dump it: the job ended"):
        made(Program(status=-9)).dump(Tree(ID, os.getpid(), 7, OWNER), image[1], timeout_s=5, stop=Stops())


def test_dump_into_a_full_file_system_is_distinguished(
    image: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is recognized by the log or by the space left: the log is cut off, too, if nothing can be written."""
    tree = Tree(ID, os.getpid(), 7, OWNER)
    (image[0] / "dump.log").write_text("(0.1) Error (criu/a.c:1): Can't write: No space left on device\n")
    with pytest.raises(DumpNoRoom, match="ran full"):
        made(Program(status=1)).dump(tree, image[1], timeout_s=5, stop=Stops())
    (image[0] / "dump.log").write_text("")
    (image[0] / "pages-7.img").write_bytes(b"half")
    for status in (0, 1):
        with pytest.raises(DumpFailed) as caught:
            made(Program(status=status)).dump(tree, image[1], timeout_s=5, stop=Stops())
        assert not isinstance(caught.value, DumpNoRoom)
    monkeypatch.setattr(root_directory, "is_full", lambda at: at == image[1])
    for status in (0, 1):
        with pytest.raises(DumpNoRoom):
            made(Program(status=status)).dump(tree, image[1], timeout_s=5, stop=Stops())


def test_exit_status_0_does_not_suffice(image: tuple[Path, int]) -> None:
    """The dump has no pages."""
    (image[0] / "pages-7.img").unlink()
    with pytest.raises(DumpFailed, match="reported success, but the image is not complete"):
        made(Program()).dump(Tree(ID, os.getpid(), 7, OWNER), image[1], timeout_s=5, stop=Stops())


def test_restore_into_a_namespace_with_processes_is_refused(
    image: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmptyNamespace, "members", lambda self: {2: 12345})
    pages = Mock(check=lambda path, blocks: deque(blocks, maxlen=0))
    with pytest.raises(RestoreFailed, match="not empty"):
        made(Program()).restore(ID, image[1], [], root_pid_ns=7, timeout_s=5, pages=pages, user=OWNER)


def test_cgroup_files_are_those_of_the_process(tmp_path: Path) -> None:
    """Cgroups that the agent itself is in are skipped; no path leads out of the cgroup root."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    for pid, text in (
        ("self", "0::/agent\n"),
        ("9", "5:memory:/slurm/job_1\n4:cpu,cpuacct:/slurm/job_1\n3:pids:/../../etc\n0::/agent\n"),
    ):
        (proc / pid).mkdir(parents=True)
        (proc / pid / "cgroup").write_text(text)
    for controller in ("memory", "cpu,cpuacct"):
        (root / controller / "slurm" / "job_1").mkdir(parents=True)
        (root / controller / "slurm" / "job_1" / "cgroup.procs").touch()
    result = cgroup_files(9, root, proc=proc)
    assert [file.relative_to(root).parts[0] for file in result] == ["memory", "cpu,cpuacct"]


def test_job_is_released_only_while_criu_runs(image: tuple[Path, int]) -> None:
    """CRIU traces the processes itself; afterwards they are held again, whatever its result."""
    stop = Stops()

    def criu(argv: Sequence[str], **options: Any) -> Completed:
        if "--version" not in argv:
            stop.calls.append("criu")
        return Program(status=1)(argv, **options)

    with pytest.raises(DumpFailed):
        made(criu).dump(Tree(ID, os.getpid(), 7, OWNER), image[1], timeout_s=5, stop=stop)
    assert stop.calls == ["release", "criu", "hold"]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ({"uid": OWNER.uid + 1}, f"process 8 would have user IDs {OWNER.uid + 1}"),
        ({"uid": 0, "gid": 0}, "process 8 would have user IDs 0"),
        ({"gid": OWNER.gid + 1}, f"process 8 would have group ID {OWNER.gid + 1}, which its owner does not have"),
        ({"groups": b"\x04"}, "process 8 would have group 4"),
    ],
)
def test_image_with_rights_beyond_those_of_the_owner_is_refused(
    image: tuple[Path, int], ids: dict[str, Any], expected: str
) -> None:
    """A process may have become another program right before CRIU stopped it; nothing changes the image."""
    write_core(image[0], 8, **ids)
    with pytest.raises(DumpFailed, match=f"could not be restored: {expected}"):
        made(Program()).dump(Tree(ID, os.getpid(), 7, OWNER), image[1], timeout_s=5, stop=Stops())


@pytest.mark.parametrize(
    ("numbers", "limit", "last"),
    [
        ([2, 3, 9], 32768, 300 + 6 + 64),
        ([5001, 5002, 5100], 32768, 5164),
        ([30000, 32700, 32767], 32768, 300 + (30000 - 300) // 2),
        ([310, 32760], 32768, 310 + (32760 - 310) // 2),
    ],
)
def test_pids_of_criu_keep_away_from_those_of_the_image(numbers: list[int], limit: int, last: int) -> None:
    """Above all of them, or in the middle of the widest gap once they have reached the limit."""
    assert _free_pid(numbers, limit) == last


def test_image_without_a_gap_is_refused() -> None:
    with pytest.raises(RestoreFailed, match="leaves no PIDs"):
        _free_pid(range(300, 1000), 1000)
