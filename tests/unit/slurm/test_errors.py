"""Slurm's error messages are translated to exceptions; the texts are those of 24.11 and 26.05."""

from __future__ import annotations

import pytest

from slurm_affinode.slurm import interface


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("Invalid job id specified for job 9\nslurm_suspend error:Invalid job id specified", interface.UnknownJobError,
         "Invalid job id specified"),
        ("scancel: error: Kill job error on job ID 1: Access/permission denied", interface.NotPermittedError,
         "Access/permission denied"),
        ("job notify failure: Invalid user id", interface.NotPermittedError, "Invalid user id"),
        ("scancel: error: Kill job error on job ID 9: Job/step already completing or completed",
         interface.AlreadyDoneError, "Job/step already completing or completed"),
        ("Job has already finished for job 9", interface.AlreadyDoneError, "Job has already finished"),
        ("Job is pending execution for job 4", interface.InvalidStateError, "Job is pending execution"),
        ("Requested operation is presently disabled for job 5", interface.InvalidStateError,
         "Requested operation is presently disabled"),
        ("slurm_update error: Invalid node state transition", interface.InvalidStateError,
         "Invalid node state transition"),
        ("slurm_update error: Invalid node state specified", interface.InvalidStateError,
         "Invalid node state specified"),
        ("slurm_update error: Invalid node name specified", interface.UnknownNodeError, "Invalid node name specified"),
        ("scancel: error: Kill job error on job ID 6+1: Operation not permitted on individual component of "
         "heterogeneous job", interface.InvalidStateError,
         "Operation not permitted on individual component of heterogeneous job"),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", interface.ControllerDownError,
         "Unable to contact slurm controller (connect failure)"),
        ("scontrol: error: s_p_parse_file: cannot stat file /x: No such file, retrying in 1sec",
         interface.ControllerDownError, "s_p_parse_file: cannot stat file /x: No such file, retrying in 1sec"),
        ("Something new", interface.SlurmError, "Something new"),
        ("", interface.SlurmError, "Slurm refused without saying why"),
    ],
)  # fmt: skip
def test_error_text_of_slurm_is_translated(text, kind, message):
    error = interface.refusal("do it", text, target="9")
    assert type(error) is kind
    assert str(error) == f"do it: {message}"


def test_exit_status_distinguishes_refused_from_unreachable():
    """As in all commands: 2 for a refused request, 3 for a service that does not respond."""
    assert interface.refusal("x", "Invalid user id").exit_code == 2
    assert interface.refusal("x", "connect failure").exit_code == 3
    assert issubclass(interface.AlreadyDoneError, interface.InvalidStateError)
