"""Manifests of checkpoint images, including those of other releases."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from slurm_affinode.checkpoint.image import signatures
from slurm_affinode.checkpoint.image.manifest import decode, encode, former_signature, sign
from slurm_affinode.checkpoint.interface import Image, ImageDamaged

KEY = bytes(32)


def written(image: Image, **changes: Any) -> tuple[bytes, bytes]:
    """Return the manifest with the changed keys, and its signature."""
    data = json.dumps(json.loads(encode(image.manifest)) | changes).encode()
    return data, sign(data, KEY, image.manifest.node).encode()


def test_an_older_manifest_is_read(make_image: Callable[..., Image]) -> None:
    """It lists the processes that were stopped, which is no longer used."""
    image = make_image()
    assert decode(*written(image, stopped_pids=[7]), KEY) == image.manifest


def test_manifest_with_an_unknown_key_is_refused(make_image: Callable[..., Image]) -> None:
    """An unknown key of a newer release may matter."""
    with pytest.raises(ImageDamaged, match="unknown color"):
        decode(*written(make_image(), color="red"), KEY)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dumped_epoch", float("nan"), "NaN is not a JSON value"),
        ("dumped_epoch", 10**400, "cannot be read"),
        ("started_epoch", -1, "times"),
        ("uid", -5, "numbers"),
        ("gpu_bytes", 1 << 70, "numbers"),
        ("files", ["../../etc/passwd"], "not the name of a file"),
        ("files", ["criu/.."], "not the name of a file"),
        ("files", ["a\0b"], "not the name of a file"),
        ("files", ["criu/a", "criu/a"], "listed twice"),
    ],
)
def test_invalid_value_is_refused_despite_a_valid_signature(
    make_image: Callable[..., Image], key: str, value: Any, message: str
) -> None:
    """The error is one line, and no file outside of the image is opened."""
    if key == "files":
        value = [{"path": path, "size": 1, "digest": ""} for path in value]
    with pytest.raises(ImageDamaged, match=message):
        decode(*written(make_image(), **{key: value}), KEY)


def test_manifest_that_is_nested_too_deeply_is_reported_as_damaged() -> None:
    data = b"[" * 200_000
    with pytest.raises(ImageDamaged, match="cannot be read"):
        decode(data, sign(data, KEY, "c1").encode(), KEY)


def test_manifest_of_older_release_is_read(make_image: Callable[..., Image]) -> None:
    """It was signed with the key of the cluster, without the name of a node."""
    image = make_image()
    data = encode(image.manifest)
    assert decode(data, former_signature(data, KEY).encode() + b"\n", KEY) == image.manifest


def test_manifest_names_the_node_that_signed_it(make_image: Callable[..., Image]) -> None:
    """The signature of another node, or one made for another purpose, is refused."""
    image = make_image()
    data, signature = written(image)
    assert decode(data, signature, KEY) == image.manifest
    other = sign(data, KEY, "other")
    with pytest.raises(ImageDamaged, match="'other' has signed it"):
        decode(data, other.encode(), KEY)
    forged = f"{image.manifest.node} {other.split()[1]}"
    with pytest.raises(ImageDamaged, match="signed with another key"):
        decode(data, forged.encode(), KEY)
    note = f"{image.manifest.node} {signatures.sign(KEY, 'note', image.manifest.node, data)}"
    with pytest.raises(ImageDamaged, match="signed with another key"):
        decode(data, note.encode(), KEY)


@pytest.mark.parametrize(
    "signature", [b"", b"\xff", b"c1", b"c1 \xff", b"c1 a b", b"../c1 " + b"0" * 64, b"c1 " + b"0" * 64]
)
def test_malformed_signature_is_refused(make_image: Callable[..., Image], signature: bytes) -> None:
    with pytest.raises(ImageDamaged, match="signed with another key"):
        decode(encode(make_image().manifest), signature, KEY)
