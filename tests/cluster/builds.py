"""What tests build on this machine, once for all workers of a run."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = "/usr/bin/python3.11"
"""The Python of Debian 12, for which the packages are built."""
HEADERS = """
set -e; cd /tmp; apt-get update -qq -o Acquire::Check-Valid-Until=false >&2; apt-get download -qq libslurm-dev >&2
dpkg-deb -x libslurm-dev*.deb x; tar -C x/usr/include -cf - slurm
"""

Build = Callable[[Path], None]
"""Fills an empty directory."""


class Builds:
    """Directories that several workers share: the first to need one fills it, and the others wait."""

    def __init__(self, directory: Path, run: str) -> None:
        """``run``: a name for this run of the tests."""
        self._directory, self._run = directory, run

    def get(self, name: str, build: Build) -> Path:
        """Return the directory with this name."""
        place = self._directory / f"{name}-{self._run}"
        place.mkdir(exist_ok=True)
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place / "complete").exists():
                (place / "out").mkdir()
                build(place / "out")
                (place / "complete").touch()
        return place / "out"

    def slurm_headers(self, suite: str) -> Path:
        """Return the directory of Slurm's headers of a Debian release."""

        def extract(place: Path) -> None:
            argv = ["docker", "run", "--rm", image(suite), "sh", "-c", HEADERS]
            done = subprocess.run(argv, capture_output=True, check=True, timeout=120)
            with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
                archive.extractall(place, filter="data")

        return self.get(f"headers-{suite}", extract)


def image(suite: str) -> str:
    """Return the name of the base image of a Debian release."""
    subprocess.run([REPOSITORY / "containers" / "base-image.sh", suite], check=True, timeout=600)
    return f"slurm-affinode/base:{suite}"


@pytest.fixture(scope="session")
def builds(docker: None, tmp_path_factory: pytest.TempPathFactory, testrun_uid: str) -> Builds:
    """Return the directories of this run."""
    return Builds(tmp_path_factory.getbasetemp().parent, testrun_uid)


@pytest.fixture(scope="session")
def packages(builds: Builds) -> Path:
    """The directory of the packages of ``make packages``; several workers build them once."""
    return builds.get("packages", partial(_build_packages, headers=builds.slurm_headers("trixie")))


def _build_packages(place: Path, *, headers: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env |= {"OUT": str(place), "SLURM_CFLAGS": f"-I{headers}", "PYTHON": PYTHON}
    done = subprocess.run(["make", "packages"], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
