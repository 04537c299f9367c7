"""What a release consists of: ``deploy/release``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from slurm_affinode import __version__

REPOSITORY = Path(__file__).parents[2]
UV = shutil.which("uv") or str(REPOSITORY / ".uv/bin/uv")

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "UV": UV, **more}
    return subprocess.run(command, cwd=cwd, env=env, check=False, capture_output=True, text=True)


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two clones of the last commit, in directories with different names."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("this is no clone")
    directory = tmp_path_factory.mktemp("clones")
    for name in ("one", "another"):
        done = run("git", "clone", "--quiet", "--no-local", REPOSITORY, directory / name, cwd=directory)
        assert done.returncode == 0, done.stderr
    return directory / "one", directory / "another"


def test_release_is_reproducible_and_signed(clones: tuple[Path, Path], tmp_path: Path) -> None:
    """The same commit gives the same files; the signature of their checksums is valid."""
    key = tmp_path / "key"
    assert run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key, cwd=tmp_path).returncode == 0
    for clone in clones:
        done = run(clone / "deploy/release", cwd=tmp_path, KEY=str(key))
        assert done.returncode == 0, done.stderr
    item, another = (clone / "dist/release" for clone in clones)
    names = sorted(path.name for path in item.iterdir())
    assert {Path(name).suffix for name in names} >= {".whl", ".gz", ".json", ".sig"}
    for name in names:
        assert (item / name).read_bytes() == (another / name).read_bytes(), name
    assert run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=item).returncode == 0
    public = key.with_suffix(".pub").read_text(encoding="utf-8")
    (tmp_path / "signers").write_text(f"release {public}", encoding="utf-8")
    verify = ("ssh-keygen", "-Y", "verify", "-f", tmp_path / "signers", "-I", "release", "-n", "file")
    with (item / "SHA256SUMS").open() as sums:
        done = subprocess.run([*verify, "-s", item / "SHA256SUMS.sig"], check=False, stdin=sums, capture_output=True)
    assert done.returncode == 0, done.stderr
    bom = json.loads((item / "slurm-affinode-analysis.cdx.json").read_text(encoding="utf-8"))
    assert {"polars", "sqlalchemy"} <= {component["name"] for component in bom["components"]}
    assert bom["metadata"]["component"]["version"] == __version__
    with tarfile.open(next(item.glob("slurm_affinode-*.tar.gz"))) as archive:  # sites build the plugin for their Slurm
        packed = {name.partition("/")[2] for name in archive.getnames()}
    sources = (*(REPOSITORY / "spank").glob("*.[ch]"), *(REPOSITORY / "spank").glob("tests/*.[ch]"))
    assert {"spank/Makefile", "spank/plugin.map", *(str(path.relative_to(REPOSITORY)) for path in sources)} <= packed


def test_release_of_uncommitted_changes_is_refused(clones: tuple[Path, Path]) -> None:
    """The files could not be built again from the commit."""
    clone = clones[0]
    (clone / "README.md").write_text("changed")
    done = run(clone / "deploy/release", cwd=clone)
    assert (done.returncode, done.stderr) == (1, "release: there are uncommitted changes: commit them first\n")
