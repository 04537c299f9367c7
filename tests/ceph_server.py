"""A Ceph cluster with a gateway that speaks the protocol of S3: one monitor, one storage daemon in memory.

Its programs are those of the packages ``ceph-mon``, ``ceph-osd``, ``ceph-common`` and ``radosgw``.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from background import running

ACCESS_KEY, SECRET_KEY = "test", "geheim"
PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
START_S = 120
_CONFIGURATION = """\
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon}
keyring = {root}/keyring
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
mon max pg per osd = 1000
mon allow pool size one = true
mon data avail crit = 1
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
run dir = {root}
admin socket = {root}/$name.asok
log file =
log to stderr = true
[mon.a]
mon data = {root}/mon
[osd]
osd objectstore = memstore
memstore device bytes = 2147483648
osd data = {root}/osd
[client.rgw]
rgw data = {root}/rgw
rgw frontends = beast endpoint=127.0.0.1:{rgw}
"""
_CAPABILITIES = {
    "mon.": ("mon", "allow *"),
    "client.admin": ("mon", "allow *", "osd", "allow *"),
    "client.rgw": ("mon", "allow *", "osd", "allow *"),
    "osd.0": ("mon", "allow profile osd", "osd", "allow *"),
}


def _ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [entry.getsockname()[1] for entry in sockets]


@contextlib.contextmanager
def ceph_gateway(root: Path) -> Iterator[str]:
    """Start the cluster below ``root``; yield the URL of its gateway. Skip the test if a program is not installed."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: there is no Ceph cluster")
    mon, rgw = _ports(2)
    configuration, keyring = root / "ceph.conf", root / "keyring"
    fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
    configuration.write_text(_CONFIGURATION.format(fsid=fsid, mon=mon, rgw=rgw, root=root))
    for name in ("mon", "osd", "rgw"):
        (root / name).mkdir()

    def run(program: str, *arguments: str) -> None:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=START_S, cwd=root, check=False
        )
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout}{done.stderr}"

    run("ceph-authtool", "--create-keyring", str(keyring))
    for name, words in _CAPABILITIES.items():
        pairs = [word for at in range(0, len(words), 2) for word in ("--cap", *words[at : at + 2])]
        run("ceph-authtool", str(keyring), "--gen-key", "-n", name, *pairs)
    run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{mon}]", str(root / "monmap"))
    of_cluster = ("-c", str(configuration))
    run("ceph-mon", *of_cluster, "-i", "a", "--mkfs", "--monmap", str(root / "monmap"), "--keyring", str(keyring))
    with contextlib.ExitStack() as stack:

        def start(program: str, *arguments: str) -> None:
            log = root / f"{program}.log"
            stack.enter_context(running([program, *of_cluster, *arguments, "-f"], log, root))

        start("ceph-mon", "-i", "a")
        run("ceph", *of_cluster, "osd", "new", osd, "0")
        run("ceph-osd", *of_cluster, "-i", "0", "--mkfs", "--osd-uuid", osd, "--keyring", str(keyring))
        start("ceph-osd", "-i", "0")
        user = ("--uid=test", "--display-name=test", f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}")
        run("radosgw-admin", *of_cluster, "-n", "client.rgw", "user", "create", *user)
        # The gateway prefers a keyring in its own directory.
        start("radosgw", "-n", "client.rgw", "--keyring", str(keyring))
        url = f"http://127.0.0.1:{rgw}"
        _await(url)
        yield url


def _await(url: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.URLError:
            assert time.monotonic() < deadline, f"{url}: the gateway of Ceph does not respond"
            time.sleep(0.1)
