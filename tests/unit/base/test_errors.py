"""Errors quote text of users and of other programs."""

from __future__ import annotations

import pytest

from slurm_affinode.agent.client import AnswerError
from slurm_affinode.agent.requests import RequestError
from slurm_affinode.base.errors import AffinodeError, ConfigError, InputError, UnreachableError
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.slurm.interface import refusal

ODD = "a\x1b]0;title\x07\x9b31m\r\nforged: line\u202etxt\u2028\x7f\0"


@pytest.mark.parametrize(
    "error",
    [
        AffinodeError(f"process {ODD} has a socket", hint=f"end {ODD}"),
        ConfigError(ODD, hint=ODD),
        UnreachableError(ODD, hint=ODD),
        InputError("is damaged", where=ODD, hint=ODD),
        RequestError("refused", ODD, hint=ODD),
        AnswerError("refused", ODD, hint=ODD, exit_code=1),
        CheckpointError(ODD, hint=ODD),
        refusal(f"cancel job {ODD}", ODD),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_is_one_printable_line(error: AffinodeError) -> None:
    """Neither a process name nor another program's message starts a line or controls a terminal."""
    assert str(error).isprintable()
    assert error.hint is None or error.hint.isprintable()


def test_printable_text_is_unchanged() -> None:
    """Spaces, backslashes and letters of all scripts are kept."""
    text = r"C:\n é 日本語 👍"
    assert str(AffinodeError(str(AffinodeError(text)))) == text
