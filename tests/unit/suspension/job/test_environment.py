"""Slurm's variables of a restored job: those of its new attempt, for its user, in a form that a shell can source."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from slurm_affinode.base.pidfd import Id, Process, ProcessGoneError
from slurm_affinode.suspension.job.environment import JobEnvironments, exports

ODD = "a 'quoted' $(touch /nonexistent/x) `name`\nof two lines \\ "


@pytest.fixture
def shepherd() -> Iterator[Id]:
    """Return a process with variables of Slurm and others."""
    environment = {
        "SLURM_JOB_NODELIST": "c2",
        "SLURMD_NODENAME": "c2",
        "SLURM_JOB_NAME": ODD,
        "CUDA_VISIBLE_DEVICES": "3",
        "SECRET": "x",
        "SLURM_JWT": "eyJ",
        "PATH": "/bin",
    }
    process = subprocess.Popen(["/bin/sleep", "60"], env=environment)
    held = Process(process.pid)
    # The kernel lets the parent continue before the environment of the new program is set up.
    wait_until("it has its environment", lambda: held.read("environ", 1 << 20))
    yield held.id
    process.kill()
    process.wait()


def test_shell_gets_current_values(tmp_path: Path, shepherd: Id) -> None:
    """Values are unchanged; the user's token and variables of others than Slurm are omitted."""
    environments = JobEnvironments(tmp_path / "environment")
    environments.write(7, os.getuid(), shepherd)
    path = tmp_path / "environment" / "7"
    assert path.parent.stat().st_mode & 0o777 == 0o755
    shell = f". {path}; env -0 | grep -zE '^(SLURM|CUDA)' | sort -z"
    stdout = subprocess.run(["/bin/sh", "-c", shell], env={}, check=True, capture_output=True, text=True).stdout
    assert stdout.split("\0")[:-1] == [
        "CUDA_VISIBLE_DEVICES=3",
        "SLURMD_NODENAME=c2",
        f"SLURM_JOB_NAME={ODD}",
        "SLURM_JOB_NODELIST=c2",
    ]
    assert "SECRET" not in path.read_text()
    environments.remove(7)
    environments.remove(7)
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")
def test_only_the_user_of_the_job_can_read_it(shepherd: Id) -> None:
    """The group of the file and others cannot read it, and the user cannot fill the node's memory through it."""

    def allowed(uid: int, gid: int, flag: str) -> bool:
        """Return whether ``test`` of a shell finds that a user may read (``-r``) or write (``-w``) the file."""
        argv = ["/bin/sh", "-c", f'test {flag} "$0"', str(path)]
        return subprocess.run(argv, user=uid, group=gid, extra_groups=[], check=False).returncode == 0

    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        Path(place).chmod(0o755)
        path = Path(place, "environment", "7")
        JobEnvironments(path.parent).write(7, 2001, shepherd)
        assert allowed(2001, 100, "-r")
        assert not allowed(2001, 100, "-w")
        for uid, gid in ((2002, 100), (2002, path.stat().st_gid), (2002, 2001)):
            assert not allowed(uid, gid, "-r")


def test_only_files_of_jobs_on_node_are_kept(tmp_path: Path, shepherd: Id) -> None:
    """Files of ended jobs, and all other files in the directory, are removed."""
    environments = JobEnvironments(tmp_path / "environment")
    environments.keep({7})
    for job in (7, 8):
        environments.write(job, os.getuid(), shepherd)
    (tmp_path / "environment" / ".7.tmp").touch()
    environments.keep({7})
    assert [path.name for path in (tmp_path / "environment").iterdir()] == ["7"]


def test_environment_of_another_process_is_not_written(tmp_path: Path, shepherd: Id) -> None:
    """The shepherd has ended, and another process may have its PID."""
    environments = JobEnvironments(tmp_path / "environment")
    with pytest.raises(ProcessGoneError):
        environments.write(7, os.getuid(), Id(shepherd.pid, shepherd.started + 1))
    assert not (tmp_path / "environment").exists()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (b"", b""),
        (b"SLURM_X=1\0SLURM_X=2\0", b"export SLURM_X=2\n"),
        (b"SLURM_A;rm -rf /=1\0SLURM=\xff\0NO=1\0SLURM_B", b"export SLURM='\xff'\n"),
        (b"SLURM_" + b"A" * 90 + b"=1\0", b""),
        (b"SLURM_A=1\0SLURM_JWT=eyJ\0SLURM_B=cut of", b"export SLURM_A=1\n"),
    ],
)
def test_names_are_names_of_variables(environ: bytes, expected: bytes) -> None:
    """The environment is chosen by the user: nothing but names and quoted values gets into the file."""
    assert exports(environ) == expected
