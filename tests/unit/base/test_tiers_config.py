"""The section [suspend.tiers] of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode.base.config import parse
from slurm_affinode.base.errors import ConfigError


def test_tiers_are_read() -> None:
    """Without the section there is no tier in host memory."""
    assert parse("", where="c.toml").suspend.tiers.memory is None
    text = (
        '[suspend.tiers]\nmemory = "/images"\nmemory_size = "1T"\ncopy_rate = "500M"\ncompress = 3\nprefetch = "0s"\n'
    )
    tiers = parse(text, where="c.toml").suspend.tiers
    assert (tiers.memory, tiers.memory_size, tiers.compress) == (Path("/images"), "1T", 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('memory = "shm"', "suspend.tiers.memory: shm is not an absolute path"),
        ('memory_size = "0"', "suspend.tiers.memory_size: 0 is not above 0"),
        ('memory_size = "much"', "suspend.tiers.memory_size: "),
        ('copy_rate = "fast"', "suspend.tiers.copy_rate: "),
        ("compress = 20", "suspend.tiers.compress: 20 is not from 0 to 19"),
        ('prefetch = "soon"', "suspend.tiers.prefetch: "),
        ("speed = 3", "suspend.tiers.speed: unknown key"),
    ],
)
def test_mistake_is_reported_with_its_key(line: str, message: str) -> None:
    """The error is one line."""
    with pytest.raises(ConfigError, match=r"c\.toml:2: ") as caught:
        parse(f"[suspend.tiers]\n{line}\n", where="c.toml")
    assert message in str(caught.value)
