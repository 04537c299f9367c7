"""The compiled library of the join."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slurm_affinode.analysis.join import native
from slurm_affinode.base.errors import UnreachableError

SOURCES = Path(native.__file__).parent
FLAGS = ["-std=c11", "-g", "-O1", "-fPIC", "-shared", "-fwrapv", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


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
    assert (len(declared["chunk"]), len(declared["page"])) == (native.CHUNK_WIDTH, native.PAGE_WIDTH)
    assert f"CHUNK = {native.CHUNK} " in header


def test_missing_library_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "libjoin.so")
    native.library.cache_clear()
    try:
        with pytest.raises(UnreachableError, match=r"libjoin\.so: cannot be loaded: ") as caught:
            native.library()
    finally:
        native.library.cache_clear()
    assert caught.value.hint is not None


def test_arrays_of_another_type_are_rejected() -> None:
    with pytest.raises(TypeError, match="floors: float64"):
        native.record(native.LimitsRecord, floors=np.zeros(5), idle_pct=0, low_pct=5, chunk=1)
    with pytest.raises(TypeError, match="not contiguous"):
        native.record(native.LimitsRecord, floors=np.zeros(10, np.float32)[::2], idle_pct=0, low_pct=5, chunk=1)


@pytest.mark.slow
def test_library_stays_within_its_arrays(tmp_path: Path) -> None:
    """Runs tests of the join with a library that ends the process at a wrong memory access."""
    library = tmp_path / "libjoin.so"
    subprocess.run(["gcc", *FLAGS, *SANITIZE, "-o", library, *sorted(SOURCES.glob("*.c"))], check=True)
    # The sanitizer must find the C++ library that pyarrow raises exceptions with.
    loaded = [
        subprocess.run(["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    environment = {
        **os.environ, "LD_PRELOAD": " ".join(loaded), "ASAN_OPTIONS": "detect_leaks=0", "CHECKED_LIBRARY": str(library),
    }  # fmt: skip
    tests = Path(__file__).with_name("test_row_groups.py")
    quick = "arbitrary or lz4"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-k", quick, tests], check=False,
        env=environment, cwd=Path(__file__).parents[4], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
