"""Dump and restore real process trees with CRIU and an emulated GPU in a compute container.

The dumped program is `checkpoint/workload.py`. `checkpoint/session.py` dumps and restores it, controlled by
`checkpoint/drive.py`. All of them run in the container.
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from cluster.driver import Cluster

pytestmark = [pytest.mark.cluster]

SOURCE = Path(__file__).with_name("checkpoint")
TARGET = "/usr/local/share/checkpoint-test"
PYTHON = "/opt/slurm-affinode/bin/python"
ANSWER_S = 120.0
FEATURES = (
    "memory",
    "threads",
    "files",
    "shm",
    "named",
    "pipes",
    "sockets",
    "timers",
    "children",
    "daemons",
    "output",
    "gpu",
    "gpus",
    "forked",
)


class DriveError(Exception):
    """An error that slurm-affinode reported."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class Drive:
    """A running `drive.py`, or a similar program, in a container."""

    def __init__(self, container: str, *options: str, program: str = "drive.py") -> None:
        self._process = subprocess.Popen(
            ("docker", "exec", "--interactive", container, PYTHON, f"{TARGET}/{program}", *options),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __call__(self, what: str, *arguments: object) -> Any:
        """Execute a command; return its result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, "with": arguments}) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            raise AssertionError(f"no answer to {what}")
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the driver ended with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise DriveError(answer["error"], answer["text"])
        return answer["result"]

    def close(self) -> None:
        """End the program and all processes that it started."""
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def programs(cluster: Cluster) -> Cluster:
    """Install the test programs on both nodes."""
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in SOURCE.glob("*.py"):
            archive.add(path, path.name)
    for node in ("c1", "c2"):
        cluster.exec(node, "mkdir", "-p", TARGET)
        subprocess.run(
            ("docker", "exec", "--interactive", cluster.container(node), "tar", "-C", TARGET, "-xf", "-"),
            input=packed.getvalue(), check=True, timeout=60,
        )  # fmt: skip
    return cluster


@pytest.fixture
def drive(programs: Cluster) -> Iterator[Callable[..., Drive]]:
    """Yield a function that starts drives on nodes."""
    made: list[Drive] = []

    def on(node: str = "c1", *options: str, program: str = "drive.py") -> Drive:
        made.append(Drive(programs.container(node), *options, program=program))
        return made[-1]

    yield on
    for connection in made:
        connection.close()
    programs.run("c1", "gpu-emulatorctl", "fault", "clear")


def whole(features: tuple[str, ...]) -> dict[str, str]:
    """Return the workload's report if its state is unchanged."""
    return dict.fromkeys(features, "ok")


@pytest.mark.parametrize("feature", FEATURES)
def test_restored_tree_resumes_where_it_stopped(drive: Callable[..., Drive], feature: str) -> None:
    """Memory, files, shared memory, pipes, sockets, timers, children and GPU memory are restored."""
    on = drive()
    on("start", [feature])
    assert on("park")["users"] == {"gpu": 1, "gpus": 2, "forked": 1}.get(feature, 0)
    on("dump")
    on("restore")
    done = on("finish")
    assert done["found"] == whole((feature,))
    assert done["status"] == "0"


@pytest.mark.slow
def test_tree_is_restored_three_times_in_a_row(drive: Callable[..., Drive]) -> None:
    """Ten processes: each output line appears once, PID 1 sees the exit status, images are numbered."""
    on = drive()
    on("start", list(FEATURES))
    for seq in (1, 2, 3):
        parked = on("park")
        assert parked["states"] == ["checkpointed"] * 3
        assert on("gpu_processes") == [0, 0]
        dumped = on("dump")
        assert dumped["seq"] == seq
        assert dumped["pids"] >= 9
        on("restore")
        assert sum(on("gpu_processes")) == 3
    done = on("finish")
    assert done["found"] == whole(FEATURES)
    assert done["output"] == "out before\nerr before\nout after\nerr after\n"


def test_tree_is_restored_on_another_gpu(drive: Callable[..., Drive]) -> None:
    """The GPUs are mapped by pairs of UUIDs; the contents of their memory are equal."""
    on = drive()
    on("start", ["gpu"])
    assert on("gpu_processes") == [1, 0]
    on("park")
    on("dump")
    on("restore", True)
    assert on("gpu_processes") == [0, 1]
    assert on("finish")["found"] == whole(("gpu",))


def test_tree_is_restored_on_another_node(drive: Callable[..., Drive]) -> None:
    """The tree uses all features; it is restored from the shared store on GPUs that it has never used."""
    here = drive("c1")
    here("start", list(FEATURES))
    here("park")
    here("dump")
    here("share")
    assert here("gpu_processes") == [0, 0]
    on_c2 = drive("c2", "--keep")
    on_c2("restore")
    assert sum(on_c2("gpu_processes")) == 3
    done = on_c2("finish")
    assert done["found"] == whole(FEATURES)
    assert done["status"] == "0"
    assert done["output"] == "out before\nerr before\nout after\nerr after\n"


def test_node_local_files_are_restored(drive: Callable[..., Drive]) -> None:
    """Files are created on a node that lacks them; if another job has a file there, the restore is refused."""
    on = drive()
    on("start", ["named"])
    on("dump")
    on("local_files", "change")
    with pytest.raises(DriveError, match="exists already, and is another file"):
        on("restore")
    on("local_files", "remove")
    on("restore")
    assert on("finish")["found"] == whole(("named",))
    assert on("local_files", "owner") == [2001]


def test_dump_is_rolled_back(drive: Callable[..., Drive]) -> None:
    """After the dump the tree is stopped; it continues as if nothing had happened."""
    on = drive()
    features = ("memory", "threads", "gpu", "sockets", "children")
    on("start", list(features))
    on("park")
    on("dump")
    on("resume")
    assert on("finish")["found"] == whole(features)


def test_tree_that_holds_gpu_is_not_dumped(drive: Callable[..., Drive]) -> None:
    """CRIU's reason fits in one line, and the store contains no image afterwards."""
    on = drive()
    on("start", ["gpu", "memory"])
    with pytest.raises(DriveError, match="DumpFailed: CRIU could not dump it: ") as caught:
        on("dump")
    assert "\n" not in caught.value.text
    assert on("stored") == []
    assert on("finish")["found"] == whole(("gpu", "memory"))


@pytest.mark.parametrize(
    ("fault", "error"),
    [(("lock-timeout", "--count", "1"), "LockTimeout"), (("checkpoint-fails", "--count", "1"), "CudaError")],
)
def test_driver_fault_leaves_job_running(drive: Callable[..., Drive], fault: tuple[str, ...], error: str) -> None:
    """The driver fails to lock or to checkpoint one of several processes."""
    on = drive()
    on("start", ["gpu", "gpus"])
    on("fault", *fault)
    with pytest.raises(DriveError) as caught:
        on("park")
    assert caught.value.kind == error
    on("resume")
    assert on("finish")["found"] == whole(("gpu", "gpus"))


def test_forked_worker_is_unchanged_after_aborted_suspension(drive: Callable[..., Drive]) -> None:
    """The worker still has its inherited device files."""
    on = drive()
    on("start", ["forked_kept"])
    on("park")
    on("dump")
    on("resume")
    assert on("finish")["found"] == whole(("forked_kept",))


def test_failed_restore_can_be_retried(drive: Callable[..., Drive]) -> None:
    """The second restore uses the same image."""
    on = drive()
    on("start", ["gpu"])
    on("park")
    on("dump")
    on("fault", "restore-fails", "--count", "1")
    with pytest.raises(DriveError, match="CudaError"):
        on("restore")
    on("restore")
    assert on("finish")["found"] == whole(("gpu",))


@pytest.mark.parametrize("what", ["bit", "truncate", "symlink", "pstree"])
def test_modified_image_is_not_restored(drive: Callable[..., Drive], what: str) -> None:
    """No process is started in the new namespace; of the image, CRIU opens only the memory of its processes."""
    on = drive()
    on("start", ["memory"])
    on("dump")
    on("tamper", what)
    with pytest.raises(DriveError, match="ImageDamaged"):
        on("restore")
    assert on("members") == []


def test_failed_restore_leaves_no_process(drive: Callable[..., Drive]) -> None:
    """A file that the tree has open was replaced: the restore reports it and leaves no process."""
    on = drive()
    on("start", ["files", "children"])
    on("dump")
    on("change_file")
    with pytest.raises(DriveError, match=r"RestoreFailed: .*/read: has bad size") as caught:
        on("restore")
    assert "\n" not in caught.value.text
    assert on("members") == []


def test_link_in_place_of_file_is_not_opened(drive: Callable[..., Drive], programs: Cluster) -> None:
    """The link is followed with the user's rights, so no process gets a file that its user may not open."""
    on = drive()
    on("start", ["files", "children"])
    on("dump")
    file_of_root = on("link_file")
    with pytest.raises(DriveError, match=f"RestoreFailed: {file_of_root} would be open with access that its user"):
        on("restore")
    assert on("members") == []
    assert programs.exec("c1", "cat", file_of_root) == "root's\n"


def test_refusals_are_found_in_real_tree(drive: Callable[..., Drive]) -> None:
    """A daemon that left the tree, a program of another user, a debugger, io_uring, a container, a device."""
    on = drive()
    on("start", ["memory", "gpu"])
    assert on("refusals") == []
    for what, code in (
        ("daemon", "left-tree"),
        ("tracer", "traced"),
        ("root", "other-user"),
        ("namespace", "namespaces"),
        ("uring", "io-uring"),
    ):
        result = on("provoke", what)
        if result is None:
            continue  # not available on this kernel
        assert code in [refusal["code"] for refusal in result], what
        assert all("\n" not in refusal["text"] for refusal in result)
    assert on("refusals") == []


def test_dump_completes_after_death_of_agent(drive: Callable[..., Drive], programs: Cluster) -> None:
    """CRIU completes the dump. Until then the store marks the image as being written; its files can be discarded."""
    on = drive()
    on("start", ["memory", "children"])
    assert on("dump_and_die")
    deadline = time.monotonic() + 60
    while on("busy"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert on("stored") == ["0001.tmp"]
    on("discard")
    assert on("stored") == []
    on("resume")
    assert on("finish")["found"] == whole(("memory", "children"))


def test_image_has_the_size_of_its_files(drive: Callable[..., Drive]) -> None:
    """The memory of its processes is most of it."""
    on = drive()
    on("start", ["memory"])
    dumped = on("dump")
    assert dumped["size"] > 30 << 20
    assert re.fullmatch(r"4\.\d+.*", on("version"))
