"""Real trees, real CRIU, the emulated GPU: dumped in one run and restored in another, in a compute container.

What is dumped is in `checkpoint/workload.py`, who does it in `checkpoint/session.py`, told by
`checkpoint/drive.py`; all run in the container.
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
)


class DriveError(Exception):
    """What the product said."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class Drive:
    """`drive.py`, or another program like it, in a container."""

    def __init__(self, container: str, *options: str, program: str = "drive.py") -> None:
        self._process = subprocess.Popen(
            ("docker", "exec", "--interactive", container, PYTHON, f"{TARGET}/{program}", *options),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __call__(self, what: str, *arguments: object) -> Any:
        """Do something; its answer."""
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
        """End it and all that it started."""
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def programs(cluster: Cluster) -> Cluster:
    """The test programs are on both nodes."""
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
    """Drives on nodes."""
    made: list[Drive] = []

    def on(node: str = "c1", *options: str, program: str = "drive.py") -> Drive:
        made.append(Drive(programs.container(node), *options, program=program))
        return made[-1]

    yield on
    for one in made:
        one.close()
    programs.run("c1", "gpu-emulatorctl", "fault", "clear")


def whole(features: tuple[str, ...]) -> dict[str, str]:
    """What the workload says when all is as it was."""
    return dict.fromkeys(features, "ok")


@pytest.mark.parametrize("feature", FEATURES)
def test_a_tree_goes_on_where_it_was(drive: Callable[..., Drive], feature: str) -> None:
    """With what it has: memory, files, shared memory, pipes, sockets, timers, children, GPUs."""
    on = drive()
    on("start", [feature])
    assert on("park")["users"] == {"gpu": 1, "gpus": 2}.get(feature, 0)
    on("dump")
    on("restore")
    done = on("finish")
    assert done["found"] == whole((feature,))
    assert done["status"] == "0"


@pytest.mark.slow
def test_three_times_in_a_row_with_everything(drive: Callable[..., Drive]) -> None:
    """Ten processes: the output has each line once, PID 1 sees the end, images are counted."""
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


def test_it_comes_back_on_another_gpu(drive: Callable[..., Drive]) -> None:
    """By pairs of UUIDs; its contents are equal."""
    on = drive()
    on("start", ["gpu"])
    assert on("gpu_processes") == [1, 0]
    on("park")
    on("dump")
    on("restore", True)
    assert on("gpu_processes") == [0, 1]
    assert on("finish")["found"] == whole(("gpu",))


def test_it_goes_on_on_another_node(drive: Callable[..., Drive]) -> None:
    """With all that it has, from the shared store, on GPUs that it has never seen."""
    here = drive("c1")
    here("start", list(FEATURES))
    here("park")
    here("dump")
    here("share")
    assert here("gpu_processes") == [0, 0]
    there = drive("c2", "--keep")
    there("restore")
    assert sum(there("gpu_processes")) == 3
    done = there("finish")
    assert done["found"] == whole(FEATURES)
    assert done["status"] == "0"
    assert done["output"] == "out before\nerr before\nout after\nerr after\n"


def test_files_of_the_node_come_along(drive: Callable[..., Drive]) -> None:
    """To a node that has none of them; one of another job in their place is left alone, and the restore refused."""
    on = drive()
    on("start", ["named"])
    on("dump")
    on("local_files", "change")
    with pytest.raises(DriveError, match="is there already, and is another one"):
        on("restore")
    on("local_files", "remove")
    on("restore")
    assert on("finish")["found"] == whole(("named",))
    assert on("local_files", "owner") == [2001]


def test_a_dump_can_be_taken_back(drive: Callable[..., Drive]) -> None:
    """After the dump the tree is stopped; it goes on as if nothing had been."""
    on = drive()
    features = ("memory", "threads", "gpu", "sockets", "children")
    on("start", list(features))
    on("park")
    on("dump")
    on("resume")
    done = on("finish")
    # Connections are not closed when nothing was restored: the workload tells so, and all else is as it was.
    assert {name: said for name, said in done["found"].items() if name != "sockets"} == whole(
        ("memory", "threads", "gpu", "children")
    )


def test_a_tree_that_holds_its_gpu_is_not_dumped_and_runs_on(drive: Callable[..., Drive]) -> None:
    """CRIU's reason in one line; nothing is left in the store."""
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
def test_a_fault_of_the_driver_leaves_the_job_running(
    drive: Callable[..., Drive], fault: tuple[str, ...], error: str
) -> None:
    """In the lock or in the checkpoint of one of several processes."""
    on = drive()
    on("start", ["gpu", "gpus"])
    on("fault", *fault)
    with pytest.raises(DriveError) as caught:
        on("park")
    assert caught.value.kind == error
    on("resume")
    assert on("finish")["found"] == whole(("gpu", "gpus"))


def test_a_restore_that_the_driver_fails_can_be_tried_again(drive: Callable[..., Drive]) -> None:
    """From the same image."""
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
def test_a_changed_image_is_not_restored(drive: Callable[..., Drive], what: str) -> None:
    """Nothing runs in the new namespace; CRIU sees no more of it than the memory of its processes."""
    on = drive()
    on("start", ["memory"])
    on("dump")
    on("tamper", what)
    with pytest.raises(DriveError, match="ImageDamaged"):
        on("restore")
    assert on("members") == []


def test_what_cannot_be_restored_leaves_nothing(drive: Callable[..., Drive]) -> None:
    """A file that the tree has open has changed: that is told, and no process is left."""
    on = drive()
    on("start", ["files", "children"])
    on("dump")
    on("change_file")
    with pytest.raises(DriveError, match=r"RestoreFailed: .*/read: has bad size") as caught:
        on("restore")
    assert "\n" not in caught.value.text
    assert on("members") == []


def test_a_link_in_the_place_of_a_file_opens_nothing(drive: Callable[..., Drive], programs: Cluster) -> None:
    """It is followed as the user: no process gets a file that its user may not open, and the file is as it was."""
    on = drive()
    on("start", ["files", "children"])
    on("dump")
    theirs = on("link_file")
    with pytest.raises(DriveError, match=f"RestoreFailed: {theirs} would be open as its user may not open it"):
        on("restore")
    assert on("members") == []
    assert programs.exec("c1", "cat", theirs) == "root's\n"


def test_reasons_against_a_suspension_are_found_in_a_real_tree(drive: Callable[..., Drive]) -> None:
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
        found = on("provoke", what)
        if found is None:
            continue  # not to be had on this kernel
        assert code in [refusal["code"] for refusal in found], what
        assert all("\n" not in refusal["text"] for refusal in found)
    assert on("refusals") == []


def test_a_dump_goes_on_when_its_agent_dies(drive: Callable[..., Drive], programs: Cluster) -> None:
    """CRIU finishes; until then the store says that the image is being written, and what it wrote can be discarded."""
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


def test_it_is_as_quick_as_it_is_told(drive: Callable[..., Drive]) -> None:
    """The numbers of a dump are there, for the ledger."""
    on = drive()
    on("start", ["memory"])
    dumped = on("dump")
    assert dumped["size"] > 30 << 20
    assert dumped["frozen_s"] > 0
    assert re.fullmatch(r"4\.\d+.*", on("version"))
