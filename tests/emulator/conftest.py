"""The emulated driver, built once, and a separate node for each test."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulator.node import Node

SOURCE = Path(__file__).resolve().parents[2] / "containers" / "gpu-emulator"


@pytest.fixture(scope="session")
def emulator_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the libraries and the tool."""
    for tool in ("make", "gcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    for module, package in (("pynvml", "nvidia-ml-py"), ("cuda", "cuda-bindings")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{package} is not installed")
    build = tmp_path_factory.mktemp("gpu-emulator")
    subprocess.run(["make", "-s", "-C", str(SOURCE), f"BUILD={build}"], check=True, timeout=300)
    return build


@pytest.fixture
def bare_node(emulator_build: Path) -> Iterator[Node]:
    """A node that is not set up yet; every user may enter its directory."""
    with tempfile.TemporaryDirectory(prefix="gpu-node-") as directory:
        Path(directory).chmod(0o755)
        node = Node(emulator_build, Path(directory))
        yield node
        for program in node.programs:
            program.close()


@pytest.fixture
def node(bare_node: Node) -> Node:
    """A node with two GPUs of 4096 MiB; a context takes 100 MiB."""
    bare_node.init()
    return bare_node
