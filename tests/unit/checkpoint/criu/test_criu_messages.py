"""Errors of CRIU, and the checks that predict them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from slurm_affinode.checkpoint.criu import criu
from slurm_affinode.checkpoint.image import criu_images
from slurm_affinode.checkpoint.interface import (
    CudaError,
    ImageDamaged,
    ImageUnanswered,
    RestoreFailed,
    RestoreInterrupted,
    may_pass,
    restore_failure,
)


def test_messages_are_unique() -> None:
    texts = [criu_image.text for criu_image in criu_images.table()]
    assert sorted(set(texts)) == sorted(texts)


@pytest.mark.parametrize(
    ("log", "checks"),
    [
        ("File home/a b has bad size 4 (expect 5)", ("files.open_files",)),
        ("Can't find a session leader for 12", ("criu.sessions",)),
        ("Can't dump nested net namespace for 12", None),  # of a dump, which is no restore
        ("Unable to detach 12: No such process", None),
        ("Can't fork for 12: File exists", None),
        ("an error that is not listed", None),
    ],
)
def test_predicted_errors_are_not_retried(log: str, checks: tuple[str, ...] | None) -> None:
    assert criu_images.prediction(log) == checks


@pytest.mark.parametrize("message", criu_images.table(), ids=lambda problem: problem.text[:40])
def test_message_matches_its_line(message: criu_images.CriuMessage) -> None:
    """Whatever its conversions print."""
    assert message.operation in ("dump", "restore")
    line = re.sub(r"%[#0-9.]*[lzh]*[a-z]", "x y", message.text)
    assert message.matches(f"criu/{message.source}:12: {line}: No such file or directory")
    assert not message.matches("Restoring FAILED.")


@pytest.mark.parametrize(
    "message",
    [criu_image for criu_image in criu_images.table() if criu_image.operation == "restore"],
    ids=lambda problem: problem.text[:40],
)
def test_error_of_a_restore_is_retried_unless_checked(message: criu_images.CriuMessage) -> None:
    why = re.sub(r"%[#0-9.]*[lzh]*[a-z]", "1", message.text)
    error = criu._failed_for(why, SimpleNamespace(sound=lambda left_s: None), 1.0)  # type: ignore[arg-type]
    assert type(error) is (RestoreFailed if message.checks else RestoreInterrupted)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (RestoreFailed("bad size"), False),
        (RestoreInterrupted("port in use"), True),
        (ImageDamaged("changed"), False),
        (ImageUnanswered("silent"), True),
        (CudaError("out of memory"), True),
        (OSError(5, "I/O error"), True),
        (restore_failure("/a: cannot be opened", FileNotFoundError(2, "No such file")), False),
        (restore_failure("/a: cannot be opened", OSError(116, "Stale file handle")), True),
    ],
)
def test_causes_that_may_pass(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes


def test_message_is_found_in_order_and_in_one_line() -> None:
    message = criu_images.CriuMessage("File %s has bad size %d (expect %d)", "restore", "criu/files-reg.c", ())
    assert message.matches("Error (criu/files-reg.c:1): File home/has/x has bad size 3 (expect 4)")
    assert not message.matches("has bad size 3 (expect 4) File x")
    assert not message.matches("File x\nhas bad size 3 (expect 4)")
    assert not message.matches(("File " + " has bad size " * 20_000) * 3)  # takes time in proportion to its length
