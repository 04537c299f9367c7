"""The script of the archive for tests and benchmarks on a machine with a GPU, run without a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """The unpacked archive with an empty wheel; the package is that of the checkout."""
    made = tmp_path / "slurm-affinode-gpu"
    (made / "wheels").mkdir(parents=True)
    shutil.copy(REPOSITORY / "tests" / "gpu" / "bundle" / "run", made / "run")
    version = f"{sys.version_info[0]}{sys.version_info[1]}"
    zipfile.ZipFile(made / "wheels" / f"cuda_bindings-1-cp{version}-cp{version}-none.whl", "w").close()
    for name in ("tests", "benchmarks"):
        (made / name).mkdir()
        shutil.copytree(REPOSITORY / name / "gpu", made / name / "gpu")
    shutil.copytree(REPOSITORY / "tests" / "conformance", made / "tests" / "conformance")
    shutil.copy(REPOSITORY / "benchmarks" / "__init__.py", made / "benchmarks")
    (made / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: of these\naddopts = -ra --import-mode=importlib\n")
    return made


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A Python with other packages "benchmarks" and "gpu", and a plug-in of another pytest."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    (site / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for name in ("benchmarks", "gpu"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("raise ImportError('not this one')\n")
    (site / "odd-1.dist-info").mkdir()
    (site / "odd-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1\n")
    (site / "odd-1.dist-info" / "entry_points.txt").write_text("[pytest11]\nodd = benchmarks\n")
    return python


@pytest.fixture
def lean(tmp_path: Path) -> Path:
    """A Python with the packages that the archive has, and no others."""
    venv.create(tmp_path / "lean", symlinks=True, with_pip=False)
    python = tmp_path / "lean" / "bin" / "python"
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    match = re.search(r"^wanted='(.+)'$", (REPOSITORY / "tests" / "gpu" / "bundle" / "make").read_text(), re.M)
    assert match is not None
    for name in match[1].split("|"):
        for file in distribution(name).files or ():
            if file.parts[0] != ".." and file.suffix != ".pyc":
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                (site / file).symlink_to(Path(str(file.locate())))
    return python


def run(top: Path, *arguments: str, **env_: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable, **env_}
    return subprocess.run(
        [str(top / "run"), *arguments], env=env, capture_output=True, text=True, check=False, timeout=280
    )


def test_bundle_without_driver_skips_everything(top: Path) -> None:
    """The feature table, the tests and the benchmark all run without failure."""
    done = run(top)
    if "there is no NVIDIA driver here" not in done.stdout:
        pytest.skip("this machine has a driver")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert ["custom", "storage", "615"] in [row[:3] for row in rows]
    assert "skipped" in done.stdout
    assert "not yet measured on hardware" in done.stdout
    assert {path.name for path in (top / "results").iterdir()} == {"tests.json", "bench.json"}


def test_packed_packages_suffice(top: Path, lean: Path) -> None:
    """The table, all modules of the tests, and the benchmark import only what the archive has."""
    (top / "slurm_affinode").symlink_to(REPOSITORY / "slurm_affinode")
    for part, word in (("table", "custom storage"), ("tests", " skipped"), ("bench", "not yet measured on hardware")):
        done = run(top, part, PYTHON=str(lean))
        if " passed" in done.stdout:
            pytest.skip("this machine has a driver")
        assert (done.returncode, word in done.stdout) == (0, True), done.stdout + done.stderr


def test_source_tree_is_tested_offline_with_the_archive(top: Path, crowded: Path, tmp_path: Path) -> None:
    """``make test-gpu`` uses tests and package of the tree and the wheels of the archive; results go to the tree."""
    tree = tmp_path / "tree"
    bundle = tree / "tests" / "gpu" / "bundle"
    for name in ("tests", "benchmarks"):
        shutil.copytree(top / name, tree / name, ignore=shutil.ignore_patterns("bundle"))
        shutil.rmtree(top / name)
    bundle.mkdir()
    shutil.move(top / "run", bundle / "run")
    shutil.copytree(REPOSITORY / "slurm_affinode", tree / "slurm_affinode")
    (tree / "slurm_affinode" / "__init__.py").write_text("print('of the tree')\n__version__ = '0'\n")
    (tree / "dist").mkdir()
    archive = tree / "dist" / "slurm-affinode-gpu.tar.gz"
    subprocess.run(["tar", "-C", str(tmp_path), "-czf", str(archive), top.name], check=True)
    shutil.copy(REPOSITORY / "Makefile", tree)
    for target, message in (("test-gpu", " skipped in "), ("bench-gpu", "not yet measured on hardware")):
        env = {key: value for key, value in os.environ.items() if not key.startswith(("GPU_", "MAKE", "LD_LIBRARY"))}
        done = subprocess.run(
            ["make", target], cwd=tree, env={**env, "PYTHON": str(crowded)}, capture_output=True, text=True,
            check=False, timeout=280,
        )  # fmt: skip
        if " passed" in done.stdout:
            pytest.skip("this machine has a driver")
        assert (done.returncode, message in done.stdout) == (0, True), done.stdout + done.stderr
    assert "of the tree" in done.stdout
    assert (tree / "out" / "gpu" / "tests.json").exists()


def test_unknown_command_and_python_are_rejected(top: Path) -> None:
    """The error lists the available ones."""
    done = run(top, "everything")
    assert (done.returncode, "table | tests ... | bench" in done.stderr) == (2, True)
    next((top / "wheels").iterdir()).unlink()
    done = run(top)
    assert (done.returncode, "no Python that this bundle has wheels for" in done.stderr) == (3, True)
    assert f"found here: Python {sys.version.split()[0]}" in done.stderr
    done = run(top, PYTHON="/nonexistent")
    assert (done.returncode, "found here: /nonexistent, which does not run" in done.stderr) == (3, True)


def test_read_only_directory_is_reported(top: Path) -> None:
    """Wheels are unpacked beside the archive's wheels, which fails on a share mounted read-only."""
    command = [str(top / "run"), "table"]
    if os.geteuid() == 0:
        script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
        if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0:
            pytest.skip("no mount namespaces here")
        command = ["unshare", "--mount", "sh", "-c", script, str(top), *command]
    else:
        top.chmod(0o500)
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=280)
    top.chmod(0o700)
    assert (done.returncode, done.stderr) == (3, f"{top} cannot be written: copy it to where it can\n")


def test_nvidia_libraries_outside_the_loader_path_are_found(top: Path, tmp_path: Path) -> None:
    """Containers may have them in a separate directory without setting LD_LIBRARY_PATH."""
    place = tmp_path / "nvidia"
    place.mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (place / name).touch()
    script = top / "run"
    script.write_text(script.read_text().replace("/usr/local/nvidia/lib64", str(place)))
    known = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [str(script), "table"], env={**known, "PYTHON": sys.executable}, capture_output=True, text=True, check=False,
        timeout=280,
    )  # fmt: skip
    if "there is no NVIDIA driver here" not in done.stdout:
        pytest.skip("this machine has a driver")
    assert f"NVIDIA's libraries: {place}" in done.stderr


def test_installed_packages_with_the_same_names_are_ignored(top: Path, crowded: Path) -> None:
    """So are plug-ins of another pytest."""
    for part, word in (("tests", " skipped"), ("bench", "not yet measured on hardware")):
        done = run(top, part, PYTHON=str(crowded))
        assert (done.returncode, word in done.stdout) == (0, True), done.stdout + done.stderr
