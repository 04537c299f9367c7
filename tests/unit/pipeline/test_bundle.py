"""The support bundle: what is in it, and that no planted secret is."""

from __future__ import annotations

import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from click.testing import CliRunner
from sqlalchemy import make_url

from slurm_affinode.base import config as configuration
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.process import Completed
from slurm_affinode.cli.main import cli
from slurm_affinode.pipeline import bundle

PLANTED = {
    "database password": "db-hunter2!", "quoted database password": "p@ss:w0rd", "header": "tenant-s3cret",
    "token in a file": "file-token-0123456789", "password in a file": "file-passw0rd", "environment": "env-t0ken-xyz",
    "webhook": "https://chat.example.org/T0/B0/wh-secret-path", "comment": "commented-out-pw",
    "bearer in a log": "QWxhZGRpbjpvcGVuIHNlc2FtZQ", "basic in a log": "dXNlcjpwYXNzd29yZA==",
    "url in a log": "log-url-pw", "slack": "https://hooks.slack.com/services/T1/B1/abcdef",
    "json web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTYifQ.c2lnbmF0dXJl", "private key": "MIIEvQIBADANBg",
    "slurm": "SlurmAccountingPw", "option": "cli-passw", "option and value": "cli-spaced-t0ken",
    "user and password": "curl-passw",
    "key of images": "0f1e2d3c4b5a69788796a5b4c3d2e1f0", "token beside the configuration": "exporter-t0ken",
    "key in a header": "x-api-key-value", "second cookie": "session-0123",
    "account key in a unit": "azure-acc0unt-key==", "account key in the environment": "azure-env-key==",
    "account key in a connection": "azure-c0nnection-key==", "access key": "s3-access-id-0123",
    "shared access signature": "azure%2Bsas-signature", "signature of a URL": "s3-url-signature",
    "password of MySQL": "mysql-client-pw",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> configuration.Config:
    (tmp_path / "token").write_text(PLANTED["token in a file"] + "\n")
    (tmp_path / "password").write_text(PLANTED["password in a file"] + "\n")
    (tmp_path / "key").write_text(PLANTED["key of images"] + "\n")
    (tmp_path / "exporter.token").write_text(PLANTED["token beside the configuration"] + "\n")
    (tmp_path / "zombies.toml").write_text(f'[mail]\nvia = "webhook"\nwebhook = "{PLANTED["webhook"]}"\n')
    (tmp_path / "config.toml").write_text(
        f"""# password = "{PLANTED["comment"]}"
        [store]
        db = "postgresql://affinode:{PLANTED["database password"]}@db.example.org/affinode"
        state_dir = "{tmp_path}/state"
        [prometheus]
        url = "https://metrics.example.org"
        token_file = "{tmp_path}/token"
        [prometheus.headers]
        X-Tenant = "{PLANTED["header"]}"
        [zombies]
        policy = "{tmp_path}/zombies.toml"
        exporter_token_file = "{tmp_path}/password"
        """
    )
    config = configuration.load(tmp_path / "config.toml", env={})
    return replace(config, suspend=replace(config.suspend, key_file=tmp_path / "key"))  # as if that were the default


def runner(argv: Sequence[str], **_: Any) -> Completed:
    """Return a log with credentials of many forms, as programs write them."""
    log = f"""GET https://u:{PLANTED["url in a log"]}@host/x failed
        Authorization: Bearer {PLANTED["bearer in a log"]}
        authorization: basic {PLANTED["basic in a log"]}
        post to {PLANTED["slack"]}: 404; cookie {PLANTED["json web token"]}
        AccountingStoragePass   = {PLANTED["slurm"]}
        exec foo --password={PLANTED["option"]} --verbose
        exec foo --token {PLANTED["option and value"]} --token-file /etc/foo.token --verbose
        curl -u ann:{PLANTED["user and password"]} -H "X-Api-Key: {PLANTED["key in a header"]}" https://host/x
        Cookie: theme=dark; session={PLANTED["second cookie"]}
        Environment=AZURE_STORAGE_ACCOUNT_KEY={PLANTED["account key in a unit"]}
        Environment=MYSQL_PWD={PLANTED["password of MySQL"]}
        AccountName=a;AccountKey={PLANTED["account key in a connection"]};EndpointSuffix=core.windows.net
        access_key_id = "{PLANTED["access key"]}"
        PUT https://a.blob.core.windows.net/c/x?sv=2024-11-04&sig={PLANTED["shared access signature"]}&se=2026 failed
        GET https://b.s3.amazonaws.com/x?X-Amz-Signature={PLANTED["signature of a URL"]}&X-Amz-Date=2026 failed
        {PLANTED["account key in the environment"]} was refused
        {PLANTED["key of images"]} is no key, {PLANTED["token beside the configuration"]} neither
        token {PLANTED["token in a file"]} was read from {PLANTED["environment"]}
        -----BEGIN PRIVATE KEY-----
        {PLANTED["private key"]}
        -----END PRIVATE KEY-----
        job 4711: suspended
        image signature: does not match; PWD=/root; public_key = here; key_file = "/etc/image.key\""""
    if argv[0] == "criu":
        raise UnreachableError("criu: no such program")
    return Completed(tuple(argv), 0, log.encode(), "")


def contents(path: Path) -> Mapping[str, str]:
    with tarfile.open(path) as archive:
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }


@pytest.fixture
def written(config: configuration.Config, tmp_path: Path) -> Mapping[str, str]:
    environment = {"SLURM_AFFINODE_PROMETHEUS_TOKEN": PLANTED["environment"], "PATH": "/usr/bin", "HOME": "/root"}
    environment["AZURE_STORAGE_ACCOUNT_KEY"] = PLANTED["account key in the environment"]
    environment["SLURM_AFFINODE_DB"] = "mariadb://a:p%40ss%3Aw0rd@h/d"
    agent = {"metrics": [{"name": "slurm_affinode_agent_jobs"}, {"name": "slurm_affinode_agent_job_info"}]}
    checks = {"checks": [{"name": "store", "detail": f"no access with {PLANTED['quoted database password']}"}]}
    path = tmp_path / "out.tar.gz"
    names, removed = bundle.write(path, config, checks, lambda: agent, run=runner, environment=environment)
    assert removed > len(PLANTED)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    result = contents(path)
    assert sorted(result) == names
    return result


def test_no_planted_secret_is_left(written: Mapping[str, str]) -> None:
    everything = "\n".join(written.values())
    assert [what for what, secret in PLANTED.items() if secret in everything] == []


def test_what_support_needs_is_kept(written: Mapping[str, str]) -> None:
    """Settings with their comments, messages and names of hosts; a program that is missing is reported."""
    assert 'url = "https://metrics.example.org"' in written["config-config.toml"]
    assert "db.example.org/affinode" in written["config-config.toml"]
    assert "token_file = " in written["config-config.toml"]
    assert "job 4711: suspended" in written["log-agent.txt"]
    assert "--verbose" in written["log-agent.txt"]
    assert "--token-file /etc/foo.token" in written["log-agent.txt"]
    assert (
        'signature: does not match; PWD=/root; public_key = here; key_file = "/etc/image.key'
        in written["log-agent.txt"]
    )
    assert "sv=2024-11-04" in written["log-agent.txt"]
    assert "X-Amz-Date=2026" in written["log-agent.txt"]
    assert "EndpointSuffix=core.windows.net" in written["log-agent.txt"]
    assert "no such program" in written["criu.txt"]
    assert '"version"' in written["about.json"]
    assert "job_info" not in written["agent-metrics.json"]
    assert "slurm_affinode_agent_jobs" in written["agent-metrics.json"]


@pytest.mark.parametrize("password", ["pa/ss-1234", "pa?ss/1234", "pa#ss-1234", "pa:ss/1234", "pa%2Fss-1234"])
def test_database_password_with_separators_of_urls_is_removed(password: str) -> None:
    """SQLAlchemy accepts them. In a log, the URL may be one that no configuration has."""
    url = f"postgresql://affinode:{password}@db.example.org/affinode"
    assert make_url(url).password == unquote(password)
    known = bundle.Redactor(bundle.secrets([f'[store]\ndb = "{url}"\n'], {}, lambda path: ""))
    for redact in (known, bundle.Redactor(())):
        assert redact(f"db = '{url}'") == f"db = 'postgresql://{bundle.HIDDEN}@db.example.org/affinode'"
    assert known(f"authentication with {unquote(password)} failed") == f"authentication with {bundle.HIDDEN} failed"


def test_short_values_are_no_secrets() -> None:
    """They would be replaced in unrelated words."""
    redact = bundle.Redactor(["a", "abc", ""])
    assert redact("a cab, abc") == "a cab, abc"


def test_doctor_writes_a_bundle(config: configuration.Config, tmp_path: Path) -> None:
    """The exit status is that of the checks, and nothing else is printed on standard output."""
    path = tmp_path / "support.tar.gz"
    state = ["--db", f"sqlite:///{tmp_path}/x.sqlite"]
    arguments = ["doctor", "--bundle", str(path), "--config", str(config.source), *state]
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert done.return_value in (1, 3), done.output
    assert "secret" in done.output
    assert PLANTED["database password"] not in "\n".join(contents(path).values())
    assert '"checks"' in contents(path)["doctor.json"]
