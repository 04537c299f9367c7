"""The section ``[suspend.tiers]`` of the configuration: where copies of images are kept, and how they move."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurm_affinode.configvalues import span, within
from slurm_affinode.errors import AffinodeError, ConfigError
from slurm_affinode.sizes import parse_size

MOST = 19


@dataclass(frozen=True, slots=True)
class TiersConfig:
    """Tiers besides ``suspend.local_store`` and ``suspend.shared_store``, and the copies between all of them."""

    memory: Path | None = None
    """A directory on a tmpfs: images are written there first, and brought there before they are restored; ``None``: no
    tier in host memory."""
    memory_size: str = "32G"
    """At most so much host memory for images."""
    memory_reserve: str = "16G"
    """So much host memory is left to jobs: images leave the tier before less is available."""
    copy_rate: str | None = None
    """Bytes per second of one node to the shared store, e.g. ``500M``; ``None``: as fast as it goes."""
    pull_rate: str | None = None
    """Bytes per second that one node reads ahead of starts; a restore that waits has no limit."""
    direct: bool = True
    """Write to disk and shared store past the page cache, where their file systems let us."""
    compress: int = 0
    """Level of zstd (1 to 19) for images in the shared store; 0: not compressed. Needs the extra ``zstd``."""
    prefetch: str = "10m"
    """Bring an image to a node so long before Slurm expects to start its job there; ``0s``: not before it starts."""


def check_tiers(tiers: TiersConfig, where: str) -> None:
    """Raise ``ConfigError``, naming file and key, for a value of the right kind that cannot be."""
    for key in ("memory_size", "memory_reserve", "copy_rate", "pull_rate"):
        text = getattr(tiers, key)
        try:
            found = None if text is None else parse_size(text)
        except AffinodeError as error:
            raise ConfigError(f"{where}: suspend.tiers.{key}: {error}", hint=error.hint) from None
        if found == 0 and key != "memory_reserve":
            raise ConfigError(f"{where}: suspend.tiers.{key}: {text} is not above 0")
    span(where, "suspend.tiers.prefetch", tiers.prefetch)
    within(where, "suspend.tiers.compress", tiers.compress, 0, MOST)
    if tiers.memory is not None and not tiers.memory.is_absolute():
        raise ConfigError(f"{where}: suspend.tiers.memory: {tiers.memory} is not an absolute path")
