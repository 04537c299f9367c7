"""Errors of an object store: one line, without secrets."""

from __future__ import annotations

import os
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import blake2b
from pathlib import Path

import pytest
from ceph_server import ACCESS_KEY, SECRET_KEY
from object_server import Answer, ObjectServer, azure_settings, refusal

from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.metrics.parquet.objects import ConflictError, ObjectClient


def test_objects_are_written_on_conditions(object_server: ObjectServer) -> None:
    """A writer that has read another version is refused."""
    client = ObjectClient(f"{object_server.bucket()}/a b/c")
    first = client.put("x", b"1", None)
    second = client.put("x", b"2", first)
    for known in (None, first):
        with pytest.raises(ConflictError):
            client.put("x", b"3", known)
    assert client.get("x") == (b"2", second)
    assert client.get("y") is None
    client.delete(["x", "y"])
    assert client.get("x") is None


def test_server_may_compare_tags_without_quotes(s3: ObjectServer) -> None:
    """It refuses the version that it has; another one is refused as well."""
    s3.bare_tags = True
    test_objects_are_written_on_conditions(s3)


def test_large_file_is_sent_in_pieces(
    object_server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Size and digest are those of what came."""
    monkeypatch.setattr("slurm_affinode.metrics.parquet.objects._CHUNK", 5 << 20)
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * (11 << 12))
    digest = blake2b(path.read_bytes(), digest_size=16).hexdigest()
    client = ObjectClient(f"{object_server.bucket()}/p")
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
def test_refusal_is_one_line(object_server: ObjectServer, tmp_path: Path, answer: Answer, message: str) -> None:
    """Of the answer, code and message are shown, and nothing of the request."""
    url = f"{object_server.bucket()}/p"
    client = ObjectClient(url)
    object_server.before = lambda method, path: answer
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
    assert error.value.hint == "check the endpoint (AWS_ENDPOINT_URL) and the network"


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """A server that answers only what a test tells it, with the environment of a client of Azure."""
    monkeypatch.setattr("slurm_affinode.metrics.parquet.objects._RETRIES", {"max_retries": 0})
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)

    def nothing(environ: dict[str, object], start: Callable[..., object]) -> list[bytes]:
        start("500 Internal Server Error", [])
        return []

    with closing(ObjectServer(nothing, scheme="abfs")) as server, azure_settings(server.url):
        yield server


@pytest.mark.parametrize(
    ("status", "code", "message", "hint"),
    [
        ("404 Not Found", "ContainerNotFound", "The specified container does not exist.", "create the bucket"),
        ("403 Forbidden", "AuthenticationFailed", "The signature did not match.", "the credentials must permit"),
        ("403 Forbidden", "AuthorizationPermissionMismatch", "This is not permitted.", "the credentials must permit"),
    ],
)
def test_refusal_of_azure_is_explained(  # noqa: PLR0917
    azure: ObjectServer, tmp_path: Path, status: str, code: str, message: str, hint: str
) -> None:
    """A container that does not exist is an error, and not an empty store. Its message has the ID of the request."""
    azure.before = lambda method, path: refusal(status, code, f"{message}\nRequestId:0-1\nTime:2026-11-01T08:00:00Z")
    client = ObjectClient("abfs://samples/p")
    for act in (
        lambda: client.get("x"), lambda: client.download("x", tmp_path / "x"), lambda: client.put("x", b"", None),
        lambda: client.delete(["x"]), lambda: list(client.names()),
    ):  # fmt: skip
        with pytest.raises(
            UnreachableError, match=rf"^abfs://samples/p[x/]*: cannot be \w+: {code}: {message}$"
        ) as error:
            act()
        assert str(error.value.hint).startswith(hint)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"AZURE_STORAGE_ACCOUNT_NAME": ""}, "[^\\n]*Account must be specified"),
        ({"AZURE_STORAGE_ACCOUNT_KEY": "ge heim"}, "[^\\n]*Invalid Access Key: [^\\n]*"),
        ({"AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1/a"}, "[^\\n]*error sending request"),
        ({"AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1/a", "AZURE_STORAGE_ACCOUNT_KEY": "",
          "AZURE_STORAGE_SAS_TOKEN": "sv=2021-08-06&sig=geheim"}, "[^\\n]*error sending request"),
    ],
)  # fmt: skip
def test_wrong_settings_of_azure_are_reported(
    azure: ObjectServer, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], reason: str
) -> None:
    """In one line without secrets; the hint names the variables of Azure."""
    for name, value in settings.items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name)
    with pytest.raises(UnreachableError, match=rf"^abfs://samples/p[x/]*: cannot be \w+: {reason}$") as error:
        ObjectClient("abfs://samples/p").get("x")
    assert "AZURE_STORAGE_ACCOUNT_NAME" in str(error.value.hint)
    assert "AWS" not in str(error.value.hint)
    assert "heim" not in "".join(traceback.format_exception(error.value))
    assert azure.requests == []


def test_wrong_credentials_of_google_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "service.json"
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(file))
    with pytest.raises(UnreachableError, match=rf"^gs://b/p: cannot be opened: [^\n]*{file}[^\n]*$") as error:
        ObjectClient("gs://b/p")
    assert "GOOGLE_SERVICE_ACCOUNT" in str(error.value.hint)


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
        f"[profile site]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        f"endpoint_url = {s3.url}\nregion = x-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(profile))
    monkeypatch.setenv("AWS_PROFILE", "site")
    client = ObjectClient(f"{bucket}/p")
    client.put("x", b"1", None)
    assert s3.requests[-1] == ("PUT", f"{bucket.removeprefix('s3:/')}/p/x")


@pytest.fixture(scope="module")
def private_ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``ca.pem``, ``other.pem``, and the certificate of a server by the former."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: no certificate can be created")
    directory = tmp_path_factory.mktemp("tls")
    new = (openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
              "-addext", "basicConstraints=critical,CA:FALSE")  # fmt: skip
    for name, more in (("ca", ("-subj", "/CN=a")), ("other", ("-subj", "/CN=b")), ("server", signed)):
        argv = (*new, *more, "-keyout", f"{name}.key", "-out", f"{name}.pem")
        subprocess.run(argv, check=True, capture_output=True, timeout=240, cwd=directory)
    return directory


@pytest.fixture
def private(private_ca: Path, s3: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a server whose certificate is signed by a private CA; no bundle is set."""
    monkeypatch.setattr("slurm_affinode.metrics.parquet.objects._RETRIES", {"max_retries": 0})
    for name in ("AWS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    with closing(ObjectServer(s3.application, (private_ca / "server.pem", private_ca / "server.key"))) as server:
        bucket = s3.bucket()
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield f"{bucket}/p"


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "SSL_CERT_FILE"])
def test_private_ca_is_trusted(private: str, private_ca: Path, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle of the object store is not that of other servers."""
    monkeypatch.setenv(variable, str(private_ca / "ca.pem"))
    before = dict(os.environ)
    client = ObjectClient(private)
    version = client.put("x", b"1", None)
    assert client.get("x") == (b"1", version)
    assert dict(os.environ) == before


def test_ca_of_a_profile_is_trusted(
    private: str, private_ca: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "config"
    profile.write_text(f"[default]\nca_bundle = {private_ca}/ca.pem\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(profile))
    assert ObjectClient(private).put("x", b"1", None)


@pytest.mark.parametrize(
    "bundle", [{}, {"AWS_CA_BUNDLE": "other.pem"}, {"SSL_CERT_FILE": "other.pem"}, {"SSL_CERT_FILE": "none.pem"}]
)
def test_certificate_of_another_ca_is_one_line(
    private: str, private_ca: Path, bundle: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the hint says which variable to set."""
    for name, file in bundle.items():
        monkeypatch.setenv(name, str(private_ca / file))
    message = rf"^{private}/x: cannot be read: 127\.0\.0\.1:\d+: the certificate is not valid: UnknownIssuer$"
    with pytest.raises(UnreachableError, match=message) as error:
        ObjectClient(private).get("x")
    assert "AWS_CA_BUNDLE" in str(error.value.hint)


@pytest.mark.parametrize("file", ["none.pem", "ca.key"])
def test_unusable_ca_bundle_is_one_line(
    private: str, private_ca: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(private_ca / file))
    with pytest.raises(AffinodeError, match=rf"{file}[^\n]*: holds no certificates: [^\n]+$"):
        ObjectClient(private)
