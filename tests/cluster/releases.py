"""Releases of slurm-affinode on the nodes of a cluster: the checkout, and an earlier one, built from its sources."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.driver import Cluster, docker, wait_until
from cluster.sleepers import agent_pid, wait_for_agents

PREVIOUS = "0.9.0"
CHECKOUT = "checkout"
SOURCES = Path(__file__).resolve().parents[1] / "data" / "previous" / f"slurm-affinode-{PREVIOUS}.tar.xz"
BUILD_S = 300.0
RELEASES = "/opt/releases"
"""On a node: a directory for each release, with the Python package and its files below ``/usr`` and ``/etc``."""
INSTALLED = f"{RELEASES}/installed"
"""Link to the release that the node runs."""

# Arguments: the directory of the release.
SAVE = """
set -e
mkdir -p "$1/usr/local/lib" "$1/etc/slurm-affinode" "$1/etc/slurm"
cp -a /opt/slurm-affinode/lib/python3*/site-packages/slurm_affinode "$1/"
cp -a /usr/local/lib/slurm "$1/usr/local/lib/"
cp -a /usr/local/libexec "$1/usr/local/"
cp -a /etc/slurm-affinode/config.toml "$1/etc/slurm-affinode/"
cp -a /etc/slurm/plugstack.conf.d "$1/etc/slurm/"
"""

# Replaces files as dpkg does: running programs keep those with which they were started. Arguments: the directory.
INSTALL = """
set -e
cd /opt/slurm-affinode/lib/python3*/site-packages
cp -a "$1/slurm_affinode" slurm_affinode.new
mv slurm_affinode slurm_affinode.old
mv slurm_affinode.new slurm_affinode
rm -r slurm_affinode.old
cp -a --remove-destination "$1/usr/." /usr/
cp -a --remove-destination "$1/etc/." /etc/
slurm-affinode --version >/dev/null
"""


def build(files: Path, *, headers: Path) -> None:
    """Build ``PREVIOUS`` into an empty directory, as it is in ``RELEASES``. ``headers``: those of Slurm."""
    source = files.parent / "source"
    with tarfile.open(SOURCES) as archive:
        archive.extractall(source, filter="data")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    install = ("make", "--silent", "-C", "spank", "install", f"DESTDIR={files}", f"SLURM_CFLAGS=-I{headers}")
    for command in ((sys.executable, "hatch_build.py"), install):
        done = subprocess.run(
            command, cwd=source, env=env, capture_output=True, text=True, timeout=BUILD_S, check=False
        )
        assert done.returncode == 0, done.stderr
    package = files / "slurm_affinode"
    (source / "slurm_affinode").rename(package)
    assets = package / "_assets"
    assets.mkdir()
    for name in ("reports", "sql"):
        (source / name).rename(assets / name)
    config = source / "containers" / "config"
    (files / "etc" / "slurm").mkdir(parents=True)
    (config / "slurm-affinode").rename(files / "etc" / "slurm-affinode")
    (config / "common" / "plugstack.conf.d").rename(files / "etc" / "slurm" / "plugstack.conf.d")


@contextmanager
def beside_checkout(cluster: Cluster, nodes: tuple[str, ...], files: Path) -> Iterator[None]:
    """Provide ``PREVIOUS`` and ``CHECKOUT`` to ``install`` on these nodes; in the end all run ``CHECKOUT``."""
    for node in nodes:
        cluster.shell(node, SAVE, f"{RELEASES}/{CHECKOUT}")
        cluster.exec(node, "ln", "-s", CHECKOUT, INSTALLED)
        docker("cp", "--quiet", f"{files}/.", f"{cluster.container(node)}:{RELEASES}/{PREVIOUS}")
    try:
        yield
    finally:
        for node in nodes:
            install(cluster, node, CHECKOUT)
            cluster.exec(node, "rm", "-r", RELEASES)


def install(cluster: Cluster, node: str, release: str) -> None:
    """Install a release on a node that runs another, and restart its agent, as the packages do; jobs continue."""
    if cluster.exec(node, "readlink", INSTALLED).strip() == release:
        return
    cluster.shell(node, INSTALL, f"{RELEASES}/{release}")
    cluster.exec(node, "ln", "-sfn", release, INSTALLED)
    if node == "login":
        return
    before = agent_pid(cluster, node)
    cluster.shell(node, f"kill {before}")
    wait_until("the agent is restarted", lambda: agent_pid(cluster, node), lambda pid: pid != before)
    wait_for_agents(cluster)
