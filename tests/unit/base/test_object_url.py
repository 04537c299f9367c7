"""Places of the sample store, as typed by administrators."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.object_url import ObjectPrefix, store_place

CACHE = Path("/c")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket", "s3://bucket"),
        ("S3://bucket/a/b/", "s3://bucket/a/b"),
        ("gs://bucket/x", "gs://bucket/x"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
    ],
)
def test_url_of_objects(text: str, url: str) -> None:
    """Each URL has copies of its own."""
    place = store_place(text, CACHE, 7)
    assert isinstance(place, ObjectPrefix)
    assert (str(place), place.cache.parent, place.cache_bytes) == (url, CACHE, 7)
    assert place.cache != store_place("s3://other", CACHE, 7).cache  # type: ignore[union-attr]
    inner = place / "serving"
    assert (inner.url, inner.cache) == (f"{url}/serving", place.cache / "serving")
    assert pickle.loads(pickle.dumps(place.absolute())) == place  # noqa: S301 - made here


@pytest.mark.parametrize("text", ["/var/x y", "file:///var/x%20y", "file://localhost/var/x%20y"])
def test_path_of_directory(text: str) -> None:
    assert store_place(text, CACHE, 7) == Path("/var/x y")


@pytest.mark.parametrize(
    "text",
    ["", "history", "s3:bucket", "s3://", "s3:///x", "http://host/x", "file://host/x", "s3://b/x#y", "s3://b/x y",
     "s3://b:port/x", "s3://[x/y", "s3://b/\x1b"],
)  # fmt: skip
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(AffinodeError, match=r"^[^\n]*(URL|path)[^\n]*$"):
        store_place(text, CACHE, 7)


@pytest.mark.parametrize(
    "text", ["s3://key:geheim@bucket/x", "s3://geheim@bucket", "abfs://c:geheim@host/x", "s3://b/x?token=geheim"]
)
def test_credentials_are_refused_and_not_printed(text: str) -> None:
    with pytest.raises(AffinodeError, match=r"^credentials in the URL") as error:
        store_place(text, CACHE, 7)
    assert "geheim" not in str(error.value)
