"""The compiled library of the join. ``tests/fuzz/join.c`` runs its code under sanitizers."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slurm_affinode.analysis.join import native
from slurm_affinode.base import compiled
from slurm_affinode.base.errors import UnreachableError

SOURCES = Path(native.__file__).parent
REPOSITORY = Path(__file__).parents[4]


def test_structures_are_those_of_the_header() -> None:
    """Names and order of the fields; pointers and numbers are at the same places."""
    header = re.sub(r"//.*", "", (SOURCES / "join.h").read_text())
    declared = {
        name: re.findall(r"\b(\w+)(?=[,;])", body)
        for name, body in re.findall(r"struct (\w+) \{(.*?)\};", header, re.S)
    }
    for kind in native.Record.__subclasses__():
        assert (
            list(kind.types) == declared[re.sub(r"(?<!^)([A-Z])", r"_\1", kind.__name__.removesuffix("Record")).lower()]
        ), kind
    assert f"CHUNK = {native.CHUNK} " in header


@pytest.fixture
def unloaded() -> Iterator[None]:
    """Let the test load a library of its own."""
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("content", [None, b"", b"\x7fELF nonsense"], ids=["missing", "empty", "damaged"])
def test_missing_or_damaged_library_is_one_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None
) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "libjoin.so")
    if content is not None:
        native.LIBRARY.write_bytes(content)
    message = r"^\S*libjoin\.so: the compiled part .* cannot be loaded: [^\n]*$"
    with pytest.raises(UnreachableError, match=message) as caught:
        native.library()
    assert caught.value.hint is not None
    assert "hatch_build.py" in caught.value.hint


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files from which the libraries are built."""
    package = REPOSITORY / "slurm_affinode"
    directories = [package / name for name in compiled.LIBRARIES]
    for path in (
        *(path for directory in directories for path in directory.glob("*.[ch]")),
        package / "base" / "compiled.py",
    ):
        target = tmp_path / path.relative_to(REPOSITORY)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    shutil.copy(REPOSITORY / "hatch_build.py", tmp_path)
    return tmp_path


def built(checkout: Path) -> Path:
    """Build the library of a checkout as developers do."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler is installed")
    subprocess.run([sys.executable, checkout / "hatch_build.py"], check=True)
    return checkout / SOURCES.relative_to(REPOSITORY) / "libjoin.so"


@pytest.mark.usefixtures("unloaded")
def test_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> None:
    """A structure may have changed: the fields of one would be taken for those of another."""
    monkeypatch.setattr(native, "LIBRARY", built(checkout))
    native.library()
    native.library.cache_clear()
    with (checkout / SOURCES.relative_to(REPOSITORY) / "join.h").open("a") as header:
        header.write("// changed\n")
    monkeypatch.setattr(native, "LIBRARY", built(checkout).rename(checkout / "changed.so"))
    with pytest.raises(UnreachableError, match="compiled from another version of its sources"):
        native.library()


@pytest.mark.usefixtures("unloaded")
def test_library_without_digest_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Any other library of the system takes its place."""
    monkeypatch.setattr(native, "LIBRARY", Path("libc.so.6"))
    with pytest.raises(UnreachableError, match="compiled from another version of its sources"):
        native.library()


def test_failing_compiler_ends_the_build_with_one_line(checkout: Path) -> None:
    """No traceback, and no library that is left half written."""
    done = subprocess.run(
        [sys.executable, checkout / "hatch_build.py"],
        check=False, capture_output=True, text=True, env={"CC": "/bin/false", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 1
    message = r"libjoin\.so: the C compiler failed [^\n]*; install gcc and libc6-dev, or set CC [^\n]*\n"
    assert re.fullmatch(message, done.stderr)
    assert not list(checkout.rglob("*.so"))


def test_compiler_without_headers_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As gcc without libc6-dev; the build then uses the compiler of ``ziglang``."""
    compiler = runpy.run_path(str(REPOSITORY / "hatch_build.py"))["compiler"]
    for name in ("cc", "gcc"):
        (tmp_path / name).write_text("#!/bin/sh\necho no string.h >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert compiler() is None


def test_arrays_of_another_type_are_rejected() -> None:
    with pytest.raises(TypeError, match="floors: float64"):
        native.record(native.LimitsRecord, floors=np.zeros(5), idle_pct=0, low_pct=5, chunk=1)
    with pytest.raises(TypeError, match="not contiguous"):
        native.record(native.LimitsRecord, floors=np.zeros(10, np.float32)[::2], idle_pct=0, low_pct=5, chunk=1)
