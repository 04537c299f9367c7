"""Whether there is room on the GPUs for a process that comes back: asked before the driver is.

A driver 580 that runs out of memory in a restore never restores that process again (NVIDIA/cuda-checkpoint, issue 44),
so what it needs is kept from before it left, and compared with what is free.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_affinode.sizes import size

MARGIN = 64 << 20
"""Bytes per GPU on top of what it held: the driver rounds, and others come and go."""


def shortage(
    needs: Mapping[str, int], free: Mapping[str, int | None], pairs: Mapping[str, str] | None = None
) -> str | None:
    """Why what was held does not fit, one line; ``None``: it does, or what is free is not known.

    ``needs``: UUID of a GPU -> bytes held there; ``free``: UUID -> bytes free now; ``pairs``: old UUID -> new UUID.
    """
    wanted: dict[str, int] = {}
    for uuid, held in needs.items():
        there = uuid if pairs is None else pairs.get(uuid, uuid)
        wanted[there] = wanted.get(there, 0) + held
    for uuid, held in wanted.items():
        left = free.get(uuid)
        if held and left is not None and left < held + MARGIN:
            return f"{size(held + MARGIN)} are needed on {uuid}, {size(left)} are free there"
    return None
