"""``slurm-affinode exporter``: errors of options and files. Serving is tested on the emulated driver."""

from __future__ import annotations

import threading
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from gpu_fakes import FakeDriver

from slurm_affinode.base import process
from slurm_affinode.base.errors import AffinodeError, InputError, UnreachableError
from slurm_affinode.cli.exporter import exporter
from slurm_affinode.pipeline.exporter import ExporterOptions, Signals, SpoolConverter, run


@pytest.mark.parametrize(
    "listen", ["9402", "host", "host:99999", "::1:9402", ":x", "host:\u00b2", "host:" + "9" * 5000]
)
def test_invalid_listen_address_is_rejected(listen: str) -> None:
    with pytest.raises(AffinodeError, match=r"is not HOST:PORT"):
        CliRunner().invoke(exporter, ["--listen", listen], catch_exceptions=False)


def test_tls_key_without_certificate_is_rejected() -> None:
    with pytest.raises(AffinodeError, match="need --tls-cert"):
        CliRunner().invoke(exporter, ["--tls-key", "x"], catch_exceptions=False)


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff\xfe", b"a\nb"])
def test_token_file_without_token_is_rejected(tmp_path: Path, content: bytes) -> None:
    """The exporter never serves without the configured token."""
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(InputError, match="token"):
        CliRunner().invoke(exporter, ["--token-file", str(path)], catch_exceptions=False)


def test_period_of_zero_is_a_usage_error() -> None:
    assert CliRunner().invoke(exporter, ["--period", "0"]).exit_code == 2


@pytest.mark.parametrize("period", ["\u00b2", "9" * 400, "99999999999d", "1.5.5", "."])
def test_invalid_period_is_rejected(period: str) -> None:
    """Digits of other scripts and out-of-range durations are rejected, too."""
    done = CliRunner().invoke(exporter, ["--period", period], standalone_mode=False)
    assert isinstance(done.exception, click.UsageError | AffinodeError)


def options(**more: object) -> ExporterOptions:
    return ExporterOptions(node="c1", cluster=None, host="127.0.0.1", port=0, period_s=0.01, **more)


def test_unwritable_spool_is_rejected_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnreachableError, match="cannot be written"):
        run(options(spool=tmp_path / "file"), FakeDriver(), Signals(), say=lambda message: None)


def test_exporter_waits_for_driver() -> None:
    """A missing driver is reported; the exporter keeps running and stops cleanly."""
    signals, messages = Signals(), []

    def say(message: str) -> None:
        messages.append(message)
        if message == "no driver":
            signals.stop.set()

    driver = FakeDriver(missing="no driver")
    thread = threading.Thread(target=run, args=(options(), driver, signals), kwargs={"say": say})
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert messages[1:] == ["no driver"]
    assert driver.closed == 1


def test_parquet_conversion_ignores_modules_in_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory may belong to another user."""
    (tmp_path / "slurm_affinode.py").write_text("raise SystemExit('mine')\n")
    (tmp_path / "gpu.csv").write_text("no table of ours\n")
    monkeypatch.chdir(tmp_path)
    messages: list[str] = []
    converter = SpoolConverter(messages.append)
    converter.add(tmp_path / "gpu.csv")
    converter.close()
    assert len(messages) == 1
    assert "is not a file of a spool" in messages[0]


def test_failed_parquet_conversion_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The converter continues with the next file."""
    messages: list[str] = []

    def fail(argv: list[str], *, timeout_s: float) -> None:
        raise UnreachableError("python ended with status 2: disk full")

    monkeypatch.setattr(process, "run", fail)
    converter = SpoolConverter(messages.append)
    converter.add(Path("/spool/a.csv"))
    converter.add(Path("/spool/b.csv"))
    converter.close()
    assert [line.split(" ")[0] for line in messages] == ["a.csv", "b.csv"]
