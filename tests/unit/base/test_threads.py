"""A thread that serves all jobs of a node survives an error in the work for one of them."""

from __future__ import annotations

import logging

import pytest

from slurm_affinode.base.threads import surviving

LOG = logging.getLogger("slurm_affinode.agent.test")


def test_error_is_logged_with_its_traceback_and_kept(caplog):
    """The code after the block runs, and can read the error."""
    with surviving(LOG, "job %d: not woken", 7) as fault:
        raise KeyError("x")
    assert isinstance(fault.error, KeyError)
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", "job 7: not woken")
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError


def test_success_is_not_logged(caplog):
    with surviving(LOG, "never") as fault:
        pass
    assert fault.error is None
    assert caplog.records == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_exit_requests_are_passed_on(kind):
    """They are not errors."""
    with pytest.raises(kind), surviving(LOG, "never"):
        raise kind
