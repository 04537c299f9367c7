"""Memory that is empty in a child process (``MADV_WIPEONFORK``), which CRIU does not carry.

The C library (glibc 2.41 on Linux 6.11) and libraries for cryptography keep the state of their random numbers in such
memory: if a restore loses the property, a process and the child that it forks afterwards draw the same numbers. CRIU
4.1 ignores the flag (``parse_vmflags`` in ``criu/proc_parse.c``), but gives any advice in the image of a mapping to the
kernel (``madv`` of ``vma_entry`` in ``images/vma.proto``, ``criu/pie/restorer.c``), of which this is one.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from slurm_affinode.base.pidfd import Namespace, Process
from slurm_affinode.checkpoint.image.criu_images import BadImage, encoded, integer, message, rewrite, spans

_AREAS = 14  # field of mm_entry in images/mm.proto
_START, _END, _ADVICE = 1, 2, 9  # fields of vma_entry in images/vma.proto
_WIPE_ON_FORK = 1 << 18  # asm-generic/mman-common.h
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")

Range = tuple[int, int]
"""First address of a mapping, and the one after its last."""


def record(directory_fd: int, space: Namespace) -> None:
    """Add the property to the mappings of a stopped tree in its dump. Raises ``BadImage``, ``OSError``.

    The files are rewritten before digests are computed.
    """
    for inner, process in space.processes():
        if ranges := wiped(process):
            name = f"mm-{inner}.img"
            missing = set(ranges)

            def with_advice(body: bytes, ranges: Collection[Range] = ranges, missing: set[Range] = missing) -> bytes:
                return b"".join(
                    encoded(_AREAS, _advised(value, ranges, missing))
                    if number == _AREAS and isinstance(value, bytes)
                    else body[begin:end]
                    for number, value, begin, end in spans(body)
                )

            rewrite(directory_fd, name, with_advice)
            if missing:
                begin, end = min(missing)
                raise BadImage(f"{name}: the mapping {begin:x}-{end:x} is missing")


def wiped(process: Process) -> frozenset[Range]:
    """Return the mappings of a process that are empty in its children; none if it has ended."""
    ranges, mapping = set(), None
    for line in process.text_if_readable("smaps").split("\n"):
        if head := _HEAD.match(line):
            mapping = int(head[1], 16), int(head[2], 16)
        elif mapping is not None and line.startswith("VmFlags:") and "wf" in line.split():
            ranges.add(mapping)
    return frozenset(ranges)


def _advised(area: bytes, ranges: Collection[Range], missing: set[Range]) -> bytes:
    fields = message(area)
    mapping = integer(fields, _START), integer(fields, _END)
    if mapping not in ranges:
        return area
    missing.discard(mapping)
    advice = encoded(_ADVICE, integer(fields, _ADVICE, 0) | _WIPE_ON_FORK)
    return b"".join(area[begin:end] for number, _, begin, end in spans(area) if number != _ADVICE) + advice
