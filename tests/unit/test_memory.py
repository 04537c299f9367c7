"""Memory that is freed is kept."""

from __future__ import annotations

import platform
import resource

import pytest

from slurm_affinode import memory

_SIZE = 40 << 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_what_was_freed_is_taken_again_without_new_pages() -> None:
    """Of a size that glibc by itself would have the kernel make anew each time."""
    memory.keep_freed()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        bytes(b"x" * _SIZE)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert min(faults() for _ in range(5)) < 100  # new pages were 10240
