"""Outcome of a test that needs something which this machine does not have."""

from __future__ import annotations

from typing import NoReturn

import pytest

from gpu.machine import Missing


def without(missing: Missing) -> NoReturn:
    """Skip the test, or fail it if the missing thing is broken."""
    if missing.broken:
        pytest.fail(missing.why, pytrace=False)
    pytest.skip(missing.why)
