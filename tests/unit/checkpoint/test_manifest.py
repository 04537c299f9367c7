"""The manifest of an image, as other releases have written it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from slurm_affinode.checkpoint.interface import Image, ImageDamaged
from slurm_affinode.checkpoint.manifest import decode, encode, sign

KEY = bytes(32)


def written(image: Image, **changes: Any) -> tuple[bytes, bytes]:
    """A manifest with other keys, and its signature."""
    data = json.dumps(json.loads(encode(image.manifest)) | changes).encode()
    return data, sign(data, KEY).encode()


def test_an_older_manifest_is_read(make_image: Callable[..., Image]) -> None:
    """It lists the processes that had been stopped, which nobody needs."""
    image = make_image()
    assert decode(*written(image, stopped_pids=[7]), KEY) == image.manifest


def test_a_newer_manifest_is_not(make_image: Callable[..., Image]) -> None:
    """A key that is not known may matter."""
    with pytest.raises(ImageDamaged, match="unknown colour"):
        decode(*written(make_image(), colour="red"), KEY)
