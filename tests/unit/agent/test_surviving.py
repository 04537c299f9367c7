"""A thread that serves all jobs of a node goes on after a fault in the work for one of them."""

from __future__ import annotations

import logging

import pytest

from slurm_affinode.agent.surviving import surviving

LOG = logging.getLogger("slurm_affinode.agent.test")


def test_a_fault_is_logged_with_its_traceback_and_kept(caplog):
    """What stands behind the block is done, and can tell."""
    with surviving(LOG, "job %d: not woken", 7) as fault:
        raise KeyError("x")
    assert isinstance(fault.error, KeyError)
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", "job 7: not woken")
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError


def test_nothing_is_said_where_nothing_is_wrong(caplog):
    """And no error is there."""
    with surviving(LOG, "never") as fault:
        pass
    assert fault.error is None
    assert caplog.records == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_order_to_end_goes_through(kind):
    """It is no fault."""
    with pytest.raises(kind), surviving(LOG, "never"):
        raise kind
