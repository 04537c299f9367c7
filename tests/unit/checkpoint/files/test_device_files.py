"""Device files in forked workers: told from those that a process has opened itself, with real processes."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.files import device_files
from slurm_affinode.pipeline.checks import OK, PROBLEM
from slurm_affinode.pipeline.doctor import forked_workers

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfds")

DEVICES = """Character devices:
  1 mem
195 nvidia
195 nvidia-modeset
195 nvidiactl
234 nvidia-caps
507 nvidia-uvm

Block devices:
  7 loop
 99 nvidia
"""


@pytest.fixture(autouse=True)
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that takes the place of a device file of the driver."""
    path = tmp_path / "nvidia0"
    path.write_bytes(bytes(4 * mmap.PAGESIZE))
    monkeypatch.setattr(device_files, "NVIDIA", re.compile(re.escape(str(path))))
    return path


@contextmanager
def child(work: str = "") -> Iterator[Process]:
    """Fork a child that executes Python code and waits."""
    ready, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            exec(work)  # noqa: S102 - of this test
            os.write(write_end, b"1")
        finally:
            os.read(os.pipe()[0], 1)
    os.close(write_end)
    try:
        assert os.read(ready, 1) == b"1"
        with Process(pid) as process:
            yield process
    finally:
        os.close(ready)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@pytest.fixture
def parent() -> Iterator[Process]:
    """Return this process."""
    with Process(os.getpid()) as process:
        yield process


@pytest.fixture
def held(device: Path) -> Iterator[int]:
    """Hold the file open, and mapped at two places; return the descriptor."""
    fd = os.open(device, os.O_RDWR)
    maps = [mmap.mmap(fd, 2 * mmap.PAGESIZE, offset=at * mmap.PAGESIZE) for at in (0, 2)]
    yield fd
    for item in maps:
        item.close()
    os.close(fd)


def test_forked_worker_inherits_device_files(parent: Process, held: int) -> None:
    """The child may have duplicated a descriptor, or closed or unmapped some."""
    for work in ("", f"os.dup({held})", f"os.close({held})", f"os.dup2({held}, 200); os.close({held})"):
        with child(work) as process:
            assert device_files.inherited(process, parent), work


def test_file_opened_by_the_child_itself_is_not_inherited(parent: Process, held: int, device: Path) -> None:
    """It does not matter whether it has inherited another descriptor of the same file."""
    opened = f"os.open({str(device)!r}, os.O_RDWR)"
    for work in (opened, f"os.close({held}); {opened}", f"os.dup2({opened}, {held})"):
        with child(work) as process:
            assert not device_files.inherited(process, parent), work


def test_mapping_made_by_the_child_itself_is_not_inherited(parent: Process, held: int) -> None:
    """The child mapped the file through an inherited descriptor, which may be closed now."""
    for more in ("", f"; os.close({held})"):
        with child(f"globals()['kept'] = mmap.mmap({held}, mmap.PAGESIZE){more}") as process:
            assert not device_files.inherited(process, parent)


def test_descriptor_that_the_parent_has_closed_is_not_inherited(parent: Process, device: Path) -> None:
    """The origin of such a descriptor is unknown."""
    fd = os.open(device, os.O_RDWR)
    with child() as process:
        assert device_files.inherited(process, parent)
        os.close(fd)
        assert not device_files.inherited(process, parent)


def test_major_numbers_are_those_of_the_driver(tmp_path: Path) -> None:
    """They are numbers of character devices; without a driver there are none."""
    assert device_files.majors(proc=tmp_path) == frozenset()
    (tmp_path / "devices").write_text(DEVICES)
    assert device_files.majors(proc=tmp_path) == {195, 234, 507}
    assert device_files.environment({507, 195}) == {"SLURM_AFFINODE_DEVICE_MAJORS": "195,507"}


def test_device_is_found_by_its_major_number(held: int) -> None:
    """The device of a descriptor is found; a regular file is not a device."""
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        with child() as process:
            assert device_files.find_device_file(process, {1}) == "/dev/null"
            assert device_files.find_device_file(process, {2, 195}) is None
    finally:
        os.close(fd)


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    """Return an installed plugin, in a directory that only this user can change."""
    directory = Path("/var/tmp") / f"criu-plugin-{os.getpid()}"  # noqa: S108 - not below a directory of pytest, which others may enter
    directory.mkdir(mode=0o755)
    path = directory / "device_files.so"
    path.write_bytes(b"")
    path.chmod(0o644)
    yield path
    for item in directory.iterdir():
        item.unlink()
    directory.rmdir()


def test_plugin_is_passed_by_descriptor(plugin: Path, tmp_path: Path) -> None:
    """The descriptor is that of the plugin's directory."""
    (tmp_path / "devices").write_text(DEVICES)
    assert device_files.why_not(plugin, proc=tmp_path) is None
    with device_files.opened(plugin) as fd:
        assert os.path.samestat(os.fstat(fd), plugin.parent.stat())


@pytest.mark.parametrize("what", ["missing", "another", "writable", "open directory", "link", "owner"])
def test_plugin_that_others_may_change_is_not_used(plugin: Path, tmp_path: Path, what: str) -> None:
    """CRIU would load it, and any other library in its directory, as root."""
    if what == "missing":
        plugin.unlink()
    elif what == "another":
        (plugin.parent / "more.so").touch()
    elif what == "writable":
        plugin.chmod(0o664)
    elif what == "open directory":
        plugin.parent.chmod(0o777)
    elif what == "link":
        plugin.rename(plugin.with_suffix(".away"))
        plugin.symlink_to(plugin.with_suffix(".away"))
    elif os.geteuid() == 0:
        os.chown(plugin, 2001, 2001)
    else:
        pytest.skip("only root gives files away")
    refused = pytest.raises(UnreachableError, match=re.escape(f"the CRIU plugin {plugin} cannot be used: "))
    with refused, device_files.opened(plugin):
        pass
    (tmp_path / "devices").write_text(DEVICES)
    assert "make -C spank install" in str(device_files.why_not(plugin, proc=tmp_path))


def test_doctor_checks_the_plugin(plugin: Path) -> None:
    """A missing plugin is reported with a hint."""
    assert forked_workers(plugin).status == OK
    plugin.unlink()
    result = forked_workers(plugin)
    assert (result.status, result.hint) == (PROBLEM, "install it with make -C spank install")


def test_plugin_is_not_used_without_driver(plugin: Path, tmp_path: Path) -> None:
    """The kernel lists no major device number of the driver."""
    assert "lists no device files" in str(device_files.why_not(plugin, proc=tmp_path))
