"""The client of the helper for the CUDA driver: unexpected replies, time limits and environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.cuda.client import Cuda, Deadlines, host_bytes
from slurm_affinode.checkpoint.interface import CudaUnavailable, HelperLost


def test_output_of_a_library_is_not_taken_for_a_reply(tmp_path: Path) -> None:
    """Neither output of ``print`` nor bytes written directly to the descriptor."""
    bindings = tmp_path / "cuda" / "bindings"
    bindings.mkdir(parents=True)
    (bindings / "__init__.py").touch()
    (bindings / "driver.py").write_text("import os\nprint('a word')\nos.write(1, b'{}\\n')\n")
    cuda = Cuda(driver_version=lambda: None, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        with pytest.raises(CudaUnavailable, match="these cuda-bindings have no cuCheckpointProcessGetState"):
            cuda.state(1)
    finally:
        cuda.close()


class Babbler:
    """A helper that does not send JSON."""

    closed = False

    def ask(self, line: bytes, *, timeout_s: float) -> bytes:
        return b"what?"

    def close(self) -> None:
        self.closed = True


def test_helper_that_sends_an_invalid_reply_is_closed_and_replaced() -> None:
    started: list[Babbler] = []

    def start(env: object) -> Babbler:
        started.append(Babbler())
        return started[-1]

    cuda = Cuda(driver_version=lambda: None, start=start)
    for _ in range(2):
        with pytest.raises(HelperLost):
            cuda.state(1)
    assert [item.closed for item in started] == [True, True]


class Late(Babbler):
    """A helper whose caller is interrupted during the request."""

    def ask(self, line: bytes, *, timeout_s: float) -> bytes:
        raise KeyboardInterrupt


def test_reply_to_an_interrupted_request_is_not_taken_for_the_next_one() -> None:
    """Ctrl-C during a call also closes the helper."""
    started: list[Late] = []

    def start(env: object) -> Late:
        started.append(Late())
        return started[-1]

    cuda = Cuda(driver_version=lambda: None, start=start)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            cuda.state(1)
    assert [item.closed for item in started] == [True, True]


class Patient(Babbler):
    """A helper that records the timeout of each request."""

    def __init__(self) -> None:
        self.limits: list[float] = []

    def ask(self, line: bytes, *, timeout_s: float) -> bytes:
        self.limits.append(timeout_s)
        return b'{"ok": "running"}'


def test_first_call_that_initializes_cuda_has_a_longer_timeout() -> None:
    """Without persistence mode it takes seconds per GPU. A helper that was only greeted has not initialized CUDA."""
    helper = Patient()
    deadlines = Deadlines(start=60.0, quick=15.0, grace=10.0)
    cuda = Cuda(driver_version=lambda: None, start=lambda _: helper, deadlines=deadlines)
    cuda.state(1)
    cuda.state(1)
    for _ in range(2):
        cuda.lock(1, timeout_ms=20_000)
    cuda.unlock(1)
    assert helper.limits == [75.0, 15.0, 90.0, 30.0, 15.0]


def test_timeout_of_a_transfer_depends_on_its_size(tmp_path: Path) -> None:
    """A helper that hangs is closed soon; if the size is unknown, after a quarter of an hour."""
    helper = Patient()
    for held, limit in ((48 * 10**9, 108.0), (0, 60.0), (None, 900.0)):
        cuda = Cuda(driver_version=lambda: None, start=lambda _: helper, held_bytes={os.getpid(): held}.get)
        cuda.devices()
        cuda.checkpoint(os.getpid())
        assert helper.limits[-1] == limit
        cuda.restore(os.getpid())
        rss = host_bytes(os.getpid())
        assert rss is not None
        assert helper.limits[-1] == pytest.approx(60 + rss / 1e9, abs=1)
    (tmp_path / "7").mkdir()
    for status, size in (
        ("VmRSS:\t 2 kB\nVmSwap:\t 3 kB\n", 32 << 10),
        ("Name:\tx\nVmRSS:\t 2 kB\n", 2048),
        ("", None),
    ):
        (tmp_path / "7" / "status").write_text(status)
        assert host_bytes(7, tmp_path) == size
    assert host_bytes(8, tmp_path) is None


def test_helper_sees_all_gpus_and_is_not_an_mps_client() -> None:
    """The agent's environment has no influence.

    A request of root to a user's MPS daemon would wait for that user's jobs.
    """
    environments: list[object] = []

    def start(env: object) -> Patient:
        environments.append(env)
        return Patient()

    env = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_MPS_PIPE_DIRECTORY": "/run/mps", "HOME": "/root"}
    Cuda(driver_version=lambda: None, start=start, env=env).state(1)
    assert environments == [{"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent", "HOME": "/root"}]
