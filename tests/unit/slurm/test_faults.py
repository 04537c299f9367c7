"""Slurm's refusals become errors by name; the texts are those of 24.11 and 26.05."""

from __future__ import annotations

import pytest

from slurm_affinode.slurm import faults


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        ("Invalid job id specified for job 9\nslurm_suspend error:Invalid job id specified", faults.UnknownJobError,
         "Invalid job id specified"),
        ("scancel: error: Kill job error on job id 1: Access/permission denied", faults.NotPermittedError,
         "Access/permission denied"),
        ("job notify failure: Invalid user id", faults.NotPermittedError, "Invalid user id"),
        ("scancel: error: Kill job error on job id 9: Job/step already completing or completed",
         faults.AlreadyDoneError, "Job/step already completing or completed"),
        ("Job has already finished for job 9", faults.AlreadyDoneError, "Job has already finished"),
        ("Job is pending execution for job 4", faults.InvalidStateError, "Job is pending execution"),
        ("Requested operation is presently disabled for job 5", faults.InvalidStateError,
         "Requested operation is presently disabled"),
        ("slurm_update error: Invalid node state transition", faults.InvalidStateError,
         "Invalid node state transition"),
        ("slurm_update error: Invalid node state specified", faults.InvalidStateError, "Invalid node state specified"),
        ("slurm_update error: Invalid node name specified", faults.UnknownNodeError, "Invalid node name specified"),
        ("scancel: error: Kill job error on job id 6+1: Operation not permitted on individual component of "
         "heterogeneous job", faults.InvalidStateError,
         "Operation not permitted on individual component of heterogeneous job"),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", faults.ControllerDownError,
         "Unable to contact slurm controller (connect failure)"),
        ("scontrol: error: s_p_parse_file: cannot stat file /x: No such file, retrying in 1sec",
         faults.ControllerDownError, "s_p_parse_file: cannot stat file /x: No such file, retrying in 1sec"),
        ("Something new", faults.SlurmError, "Something new"),
        ("", faults.SlurmError, "Slurm refused without saying why"),
    ],
)  # fmt: skip
def test_texts_of_slurm_have_names(said, kind, message):
    error = faults.refusal("do it", said, target="9")
    assert type(error) is kind
    assert str(error) == f"do it: {message}"


def test_exit_status_tells_refused_from_unreachable():
    """As everywhere: 2 for what cannot be done, 3 for what does not answer."""
    assert faults.refusal("x", "Invalid user id").exit_code == 2
    assert faults.refusal("x", "connect failure").exit_code == 3
    assert issubclass(faults.AlreadyDoneError, faults.InvalidStateError)
