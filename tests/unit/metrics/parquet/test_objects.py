"""Errors of an object store: one line, without secrets."""

from __future__ import annotations

import traceback
from hashlib import blake2b
from pathlib import Path

import pytest
from object_server import Answer, ObjectServer, refusal

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.metrics.parquet.objects import ConflictError, ObjectClient


def test_objects_are_written_on_conditions(s3: ObjectServer) -> None:
    """A writer that has read another version is refused."""
    client = ObjectClient(f"s3://{s3.bucket()}/a b/c")
    first = client.put("x", b"1", None)
    second = client.put("x", b"2", first)
    for known in (None, first):
        with pytest.raises(ConflictError):
            client.put("x", b"3", known)
    assert client.get("x") == (b"2", second)
    assert client.get("y") is None
    client.delete(["x", "y"])
    assert client.get("x") is None


def test_large_file_is_sent_in_pieces(s3: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Size and digest are those of what came."""
    monkeypatch.setattr("slurm_affinode.metrics.parquet.objects._CHUNK", 5 << 20)
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * (11 << 12))
    digest = blake2b(path.read_bytes(), digest_size=16).hexdigest()
    client = ObjectClient(f"s3://{s3.bucket()}/p")
    client.upload("large", path)
    assert client.download("large", tmp_path / "copy") == (path.stat().st_size, digest)
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    assert client.download("none", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refusal("403 Forbidden", "AccessDenied", "Access Denied"), "AccessDenied: Access Denied"),
        (refusal("400 Bad Request", "ExpiredToken", "It has expired."), "ExpiredToken: It has expired."),
        (refusal("404 Not Found", "NoSuchBucket", "No such bucket"), "NoSuchBucket: No such bucket"),
        (("403 Forbidden", b"<Error><Code>SignatureDoesNotMatch</Code><Message>They differ\n\x1b[1m</Message>"
          b"<StringToSign>geheim</StringToSign></Error>"), r"SignatureDoesNotMatch: They differ [^\n]*"),
        (("302 Found", b"<html>\n"), r"[^\n]+"),
    ],
)  # fmt: skip
def test_refusal_is_one_line(s3: ObjectServer, tmp_path: Path, answer: Answer, message: str) -> None:
    """Of the answer, code and message are shown, and nothing of the request."""
    url = f"s3://{s3.bucket()}/p"
    client = ObjectClient(url)
    s3.before = lambda method, path: answer
    for act, doing in (
        (lambda: client.get("x"), "/x: cannot be read"),
        (lambda: client.download("x", tmp_path / "x"), "/x: cannot be read"),
        (lambda: client.put("x", b"", None), "/x: cannot be written"),
        (lambda: client.upload("x", Path("/etc/hostname")), "/x: cannot be written"),
        (lambda: client.delete(["x"]), "/x: cannot be deleted"),
        (lambda: list(client.names()), ": cannot be listed"),
    ):
        with pytest.raises(UnreachableError, match=f"^{url}{doing}: {message}$") as error:
            act()
        assert error.value.hint
        assert "geheim" not in "".join(traceback.format_exception(error.value))


def test_wrong_endpoint_is_reported(monkeypatch: pytest.MonkeyPatch, s3: ObjectServer) -> None:
    monkeypatch.setattr("slurm_affinode.metrics.parquet.objects._RETRIES", {"max_retries": 0})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(UnreachableError, match=r"^s3://b/p/x: cannot be read: 127\.0\.0\.1:1: [^\n]+$") as error:
        ObjectClient("s3://b/p").get("x")
    assert error.value.hint == "check the endpoint (for s3, AWS_ENDPOINT_URL) and the network"


def test_missing_credentials_are_reported(monkeypatch: pytest.MonkeyPatch, s3: ObjectServer) -> None:
    """No request is made."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(UnreachableError, match=r"^s3://b/p: there are no credentials$"):
        ObjectClient("s3://b/p")
    assert s3.requests == []


def test_credentials_of_a_profile_are_used(monkeypatch: pytest.MonkeyPatch, s3: ObjectServer, tmp_path: Path) -> None:
    """With the endpoint of the profile."""
    bucket = s3.bucket()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    profile = tmp_path / "config"
    profile.write_text(
        f"[profile site]\naws_access_key_id = a\naws_secret_access_key = b\nendpoint_url = {s3.url}\nregion = x-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(profile))
    monkeypatch.setenv("AWS_PROFILE", "site")
    client = ObjectClient(f"s3://{bucket}/p")
    client.put("x", b"1", None)
    assert s3.requests[-1] == ("PUT", f"/{bucket}/p/x")
