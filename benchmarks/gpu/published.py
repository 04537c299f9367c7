"""Published figures, for comparison with the measured ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A published figure; a GB is 10^9 bytes."""

    what: str
    out_gbps: float | None
    in_gbps: float | None
    source: str


_VRAM_GB = 76 * 2**30 / 1e9


def _rate(seconds: float) -> float:
    return round(_VRAM_GB / seconds, 2)


PUBLISHED = (
    Published(
        "A100 80 GB, 76 GiB in use, stock CRIU with its CUDA plugin, to disk (58 s out, 43 s in)", _rate(58), _rate(43),
        "published for CUDA custom storage, driver 615 (docs/hardware.md)",
    ),
    Published(
        "A100 80 GB, 76 GiB in use, custom storage (11.4 s out, 10.4 s in)", _rate(11.4), _rate(10.4),
        "published for CUDA custom storage, driver 615 (docs/hardware.md)",
    ),
    Published(
        "8 x H100 PCIe 5, driver staging: about 15 s per GPU", None, None, "NVIDIA/cuda-checkpoint, issue 29 (2025)"
    ),
    Published("driver staging, upper end of the usual range of 2 to 5 GB/s", 5.0, 5.0, "docs/hardware.md"),
    Published("PCIe 5 x16, pinned copies (55 to 60 GB/s)", 55.0, 55.0, "docs/hardware.md"),
)  # fmt: skip
