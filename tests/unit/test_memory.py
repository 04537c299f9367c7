"""Memory that is freed is kept."""

from __future__ import annotations

import platform
import resource

import pytest

from slurm_affinode import memory

_SIZE, _COUNT = 24 << 20, 4


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_what_was_freed_is_taken_again_without_new_pages() -> None:
    """More than glibc by itself would keep: the kernel would make it anew each time."""
    memory.keep_freed()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [b"x" * _SIZE for _ in range(_COUNT)]
        blocks.clear()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert min(faults() for _ in range(5)) < 100  # new pages were 24576
