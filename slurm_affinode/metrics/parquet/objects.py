"""Objects of an object store: conditional writes, and one-line errors.

``obstore`` writes on conditions (``If-Match``, ``If-None-Match``) to S3, Google Cloud Storage and Azure alike. For S3,
``boto3`` supplies credentials, region, endpoint and CA bundle from the standard places (environment, ``~/.aws``, roles
of the machine), and renews credentials that expire.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.session
import obstore
from botocore.exceptions import BotoCoreError
from obstore.exceptions import AlreadyExistsError, BaseError, NotModifiedError, PreconditionError
from obstore.store import from_url

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.http import tls_context
from slurm_affinode.base.text import one_line

_CODE = re.compile(r"<Code>([^<]*)</Code>(?:\s*<Message>([^<]*)</Message>)?")
_SERVER = re.compile(r" https?://(?:[^/@\s]*@)?([^/?\s]+)")
_CA_HINT = "set SSL_CERT_FILE (for s3, also AWS_CA_BUNDLE) to the CA bundle (PEM) of the object store"
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_REFUSED = (
    "AccessDenied", "AuthenticationFailed", "AuthorizationFailure", "AuthorizationPermissionMismatch",
    "AuthorizationResourceTypeMismatch", "AuthorizationServiceMismatch", "NoAuthenticationInformation",
)  # fmt: skip
"""Those of Azure are from https://learn.microsoft.com/rest/api/storageservices/common-rest-api-error-codes."""
_HINTS = {
    **dict.fromkeys(_NO_BUCKET, "create the bucket or container, or correct store.history"),
    **dict.fromkeys(_REFUSED, "the credentials must permit to list the bucket, and to get, put and delete its objects"),
    "ExpiredToken": "renew the credentials",
    "InvalidCertificate": _CA_HINT,
}
_UNREACHABLE = {
    "s3": "check the endpoint (AWS_ENDPOINT_URL) and the network",
    "gs": "check the credentials (GOOGLE_SERVICE_ACCOUNT, or those of the machine) and the network",
}
_AZURE_UNREACHABLE = (
    "check AZURE_STORAGE_ACCOUNT_NAME, the credentials (AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or those "
    "of the machine), AZURE_STORAGE_ENDPOINT and the network"
)
_REQUEST_ID = re.compile(r"\s*\bRequestId:.*", re.DOTALL)
"""Azure adds it and a time to each message, in lines of their own."""
_CERTIFICATE = re.compile(r"\bInvalidCertificate\(\s*(\w+)")
_CLIENT = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "6h", "allow_http": True}
"""``timeout`` includes the transfer of a whole part."""
_RETRIES = {"max_retries": 4, "retry_timeout": timedelta(minutes=2)}
_CREDENTIALS_FOR = timedelta(minutes=5)
_CHUNK = 32 << 20
"""Larger files are sent in pieces, as S3 requires beyond 5 GB."""
_CHUNKS_AT_ONCE = 2
_READ = 8 << 20

Version = dict[str, str]
"""``e_tag`` and ``version`` of an object, for a conditional write."""


class ConflictError(Exception):
    """An object was written by another process meanwhile."""


class UnchangedError(Exception):
    """An object still has the known version."""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object of a listing."""

    name: str
    written: float
    """Seconds since the epoch, by the clock of the object store."""


class ObjectClient:
    """The objects below a URL; names are relative to it. All methods raise ``UnreachableError`` for failures."""

    def __init__(self, url: str) -> None:
        self.url = url
        with self._errors("", "opened"):
            settings, bundle = _settings(url)
            options: Any = {"client_options": _CLIENT, "retry_config": _RETRIES, **settings}
            with _trusting(bundle):
                self._store: Any = from_url(url, **options)

    def get(self, name: str, version: Version | None = None) -> tuple[bytes, Version] | None:
        """Return content and version of an object; ``None`` if it does not exist.

        Raises ``UnchangedError`` if it still has the version ``version``.
        """
        options: Any = {"if_none_match": version["e_tag"]} if version is not None and "e_tag" in version else None
        try:
            with self._errors(name, "read", NotModifiedError, FileNotFoundError):
                answer = obstore.get(self._store, name, options=options)
                return bytes(answer.bytes()), _version(answer.meta)
        except NotModifiedError as error:
            raise UnchangedError(name) from error
        except FileNotFoundError as error:
            self._raise_without_bucket(name, "read", error)
            return None

    def put(self, name: str, content: bytes, version: Version | None) -> Version:
        """Write an object if its version is still ``version``, or if ``None``, if it does not exist.

        Raises ``ConflictError``.
        """
        try:
            return self._put(name, content, "create" if version is None else version)
        except ConflictError:
            if version is None or "e_tag" not in version or not self._unchanged(name, version):
                raise
            # Ceph 16 compares If-Match with the ETag without its quotes, and so refuses the version that it has.
            return self._put(name, content, {**version, "e_tag": version["e_tag"].strip('"')})

    def _put(self, name: str, content: bytes, mode: Any) -> Version:
        try:
            with self._errors(name, "written", AlreadyExistsError, PreconditionError):
                return _version(obstore.put(self._store, name, content, mode=mode))
        except (AlreadyExistsError, PreconditionError) as error:
            raise ConflictError(name) from error

    def _unchanged(self, name: str, version: Version) -> bool:
        try:
            self.get(name, version)
        except UnchangedError:
            return True
        return False

    def upload(self, name: str, path: Path) -> None:
        """Write an object from a file."""
        with self._errors(name, "written"):
            obstore.put(self._store, name, path, chunk_size=_CHUNK, max_concurrency=_CHUNKS_AT_ONCE)

    def download(self, name: str, path: Path) -> tuple[int, str] | None:
        """Write an object to a file; return size and BLAKE2b digest (16 bytes). ``None`` if it does not exist.

        Raises ``OSError`` if the file cannot be written.
        """
        hasher, size = blake2b(digest_size=16), 0
        try:
            with self._errors(name, "read", FileNotFoundError):
                answer = obstore.get(self._store, name)
        except FileNotFoundError as error:
            self._raise_without_bucket(name, "read", error)
            return None
        chunks = iter(answer.stream(min_chunk_size=_READ))
        with path.open("wb") as file:
            while True:
                with self._errors(name, "read"):
                    chunk = next(chunks, None)
                if chunk is None:
                    break
                hasher.update(chunk)
                size += file.write(chunk)
        if size != answer.meta["size"]:
            raise UnreachableError(f"{self.url}/{name}: cannot be read: {size:,} of {answer.meta['size']:,} bytes came")
        return size, hasher.hexdigest()

    def names(self) -> Iterator[ListedObject]:
        """Yield all objects below the URL."""
        pages = iter(obstore.list(self._store))
        while True:
            with self._errors("", "listed"):
                page = next(pages, None)
            if page is None:
                return
            for entry in page:
                yield ListedObject(entry["path"], entry["last_modified"].timestamp())

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that do not exist are ignored."""
        for name in names:
            try:
                with self._errors(name, "deleted", FileNotFoundError):
                    obstore.delete(self._store, name)
            except FileNotFoundError as error:
                self._raise_without_bucket(name, "deleted", error)

    @contextmanager
    def _errors(self, name: str, doing: str, *error_types: type[Exception]) -> Iterator[None]:
        """Convert errors of the libraries; those of the types ``error_types`` are passed on."""
        try:
            yield
        except error_types:
            raise
        except (BaseError, BotoCoreError, OSError, ValueError) as error:
            raise self._error(name, doing, error) from None  # its text may quote the request

    def _error(self, name: str, doing: str, error: Exception) -> UnreachableError:
        where = f"{self.url}/{name}" if name else self.url
        code, reason = _explained(error)
        unreachable = _UNREACHABLE.get(urlsplit(self.url).scheme, _AZURE_UNREACHABLE)
        return UnreachableError(f"{where}: cannot be {doing}: {reason}", hint=_HINTS.get(code, unreachable))

    def _raise_without_bucket(self, name: str, doing: str, error: Exception) -> None:
        if _explained(error)[0] in _NO_BUCKET:
            raise self._error(name, doing, error) from None


def _explained(error: Exception) -> tuple[str, str]:
    """Return the code of an error of the server, or an empty text, and the reason in one line.

    The text of the library has the request and the whole answer, and many lines.
    """
    text = str(error)
    if match := _CODE.search(text):
        code, message = match[1], _REQUEST_ID.sub("", match[2] or "")
        return code, one_line(f"{code}: {message}" if message else code)
    first = text.partition("\n")[0]
    server = _SERVER.search(first)
    reason = first.rpartition(" - ")[2]
    if server and (certificate := _CERTIFICATE.search(text)):
        return "InvalidCertificate", one_line(f"{server[1]}: the certificate is not valid: {certificate[1]}")
    return "", one_line(f"{server[1]}: {reason}" if server else reason)


def _version(meta: Any) -> Version:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _settings(url: str) -> tuple[dict[str, Any], str | None]:
    """Return settings of a client, and its CA bundle, if it is not that of the environment or the system."""
    if urlsplit(url).scheme != "s3":
        return {}, None
    core = botocore.session.get_session()
    bundle: str | None = core.get_config_variable("ca_bundle")
    if bundle is not None:
        tls_context(bundle)
    if os.environ.get("AWS_SKIP_SIGNATURE"):
        return {}, bundle
    session = boto3.session.Session(botocore_session=core)
    settings: dict[str, Any] = {"credential_provider": _credentials(url, session)}
    region = session.region_name or "us-east-1"
    endpoint = session.client("s3", region_name=region).meta.endpoint_url
    if not endpoint.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        settings["endpoint"] = endpoint
    return {**settings, "region": region}, bundle


@contextmanager
def _trusting(bundle: str | None) -> Iterator[None]:
    """Have a client that is made now trust a CA bundle: the library has no option for it, and reads this variable."""
    if bundle is None:
        yield
        return
    before = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = bundle
    try:
        yield
    finally:
        if before is None:
            del os.environ["SSL_CERT_FILE"]
        else:
            os.environ["SSL_CERT_FILE"] = before


def _credentials(url: str, session: boto3.session.Session) -> Callable[[], dict[str, Any]]:
    credentials = session.get_credentials()
    if credentials is None:
        raise UnreachableError(
            f"{url}: there are no credentials",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE with ~/.aws",
        )

    def current() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_FOR,
        }

    return current


@lru_cache(maxsize=8)
def client(url: str) -> ObjectClient:
    """Return the client of a URL, which keeps its connections."""
    return ObjectClient(url)
