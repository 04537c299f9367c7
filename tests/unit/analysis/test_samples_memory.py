"""Freed memory stays with the process."""

from __future__ import annotations

import platform
import resource

import pytest

from slurm_affinode.analysis import samples

_SIZE, _COUNT = 24 << 20, 4


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_reused_without_page_faults() -> None:
    """The blocks are larger than glibc keeps by default; otherwise the kernel would map new pages each time."""
    samples.keep_freed()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [b"x" * _SIZE for _ in range(_COUNT)]
        blocks.clear()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert min(faults() for _ in range(5)) < 100  # 24576 page faults with new pages
