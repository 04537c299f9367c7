"""The packages of ``make packages``: built on this machine, installed on a bare Debian 12, removed and purged.

Debian 12 has a Slurm for which the plugin cannot be built: its headers are those of Debian 13.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from cluster.builds import Builds, image

from slurm_affinode import __version__
from slurm_affinode.base.extras import INSTALL

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = "/usr/bin/python3.11"
SLURM = "24.11"
NAMES = ("slurm-affinode", "slurm-affinode-node", "slurm-affinode-spank")
FILES = "find /etc /usr /opt /var -xdev ! -type d ! -path '/var/cache/*' ! -path '/var/log/*' ! -path '/var/lib/[ad]p*'"
WRITABLE = "find /etc/slurm-affinode /usr/lib/slurm-affinode /usr/lib/systemd/system/slurm-* -perm /022 ! -type l"
"""Whatever the umask of the checkout, the agent refuses configuration that others than root may write."""
CHANGED = {"/etc/passwd-", "/etc/shadow-", "/etc/group-", "/etc/gshadow-", "/etc/.pwd.lock", "/var/lib/systemd"}
"""Files of other programs that the creation of a user changes."""

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"Debian 12 has {PYTHON}, for which the packages are built"),
]


@pytest.fixture(scope="module")
def packages(builds: Builds) -> Path:
    """The directory of the packages; several workers build them once."""
    return builds.get("packages", partial(build, headers=builds.slurm_headers("trixie")))


def build(place: Path, *, headers: Path) -> None:
    """Build the packages into a directory."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env |= {"OUT": str(place), "SLURM_CFLAGS": f"-I{headers}", "PYTHON": PYTHON}
    done = subprocess.run(["make", "packages"], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Machine:
    """A container that is a bare Debian 12."""

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, command: str, status: int = 0) -> str:
        """Run a shell command as root; return its output with errors, after a check of the exit status."""
        argv = ["docker", "exec", "--env", "DEBIAN_FRONTEND=noninteractive", self._name, "sh", "-c", command]
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=400
        )
        assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def files(self) -> set[str]:
        """Return all files but those of the package managers."""
        return set(self.run(FILES).splitlines())


@pytest.fixture
def machine(packages: Path) -> Iterator[Machine]:
    """The container; the packages are in /packages, and the folder ``deploy`` in /deploy."""
    name = f"affinode-packages-{os.getpid()}"
    places = {packages: "/packages", REPOSITORY / "deploy": "/deploy", REPOSITORY / "tests" / "data": "/data"}
    volumes = [word for place, there in places.items() for word in ("--volume", f"{place}:{there}:ro")]
    argv = ["docker", "run", "--rm", "--detach", "--init", "--name", name, *volumes, image("bookworm")]
    subprocess.run([*argv, "sleep", "infinity"], check=True, timeout=60, stdout=sys.stderr)
    try:
        yield Machine(name)
    finally:
        subprocess.run(["docker", "rm", "--force", name], check=True, timeout=60, stdout=sys.stderr)


@pytest.mark.timeout(1200, func_only=True)
def test_packages_are_installed_run_and_leave_nothing(machine: Machine) -> None:
    machine.run("rm -f /etc/dpkg/dpkg.cfg.d/docker*")  # which leaves out manual pages
    machine.run("apt-get update -qq && apt-get install -qq --no-install-recommends man-db rpm systemd python3")
    before = machine.files()

    machine.run("apt-get install -qq --no-install-recommends /packages/slurm-affinode-node_*.deb")
    assert machine.run("slurm-affinode --version") == f"slurm-affinode, version {__version__}\n"
    assert machine.run(WRITABLE) == ""
    assert "the extra analysis is not installed" in machine.run("slurm-affinode doctor")
    assert INSTALL in machine.run("slurm-affinode report --since 7d", 2)
    assert "it is for slurmd to call" in machine.run("slurm-affinode prolog")
    assert "image.key" in machine.run("slurm-affinode agent", 2)

    machine.run("apt-get install -qq --no-install-recommends /packages/slurm-affinode*.deb")
    assert machine.run("man -w slurm-affinode slurm-affinode-zombies-list").count("/usr/share/man/man1/") == 2
    pages = "zcat /usr/share/man/man1/slurm-affinode*.1.gz | groff -man -ww -Tutf8 2>&1 >/dev/null"
    assert machine.run(pages) == ""
    assert "affinode.sqlite: there is no database" in machine.run("slurm-affinode doctor", 3)  # no Slurm either
    assert "/srv/demo/report.html" in machine.run("slurm-affinode demo --out /srv/demo")
    assert machine.run("stat -c '%U %a' /var/lib/slurm-affinode") == "slurm-affinode 750\n"
    listed = machine.run("dpkg -L slurm-affinode-spank").split()
    [plugin] = [file for file in listed if file.endswith("/slurm_affinode.so")]
    assert f"optional {plugin} " in machine.run("cat /etc/slurm/plugstack.conf.d/slurm-affinode.conf")
    assert f"+slurm{SLURM}-1" in machine.run("dpkg-query -W slurm-affinode-spank")
    configured = machine.run("grep -hoE '^(shepherd|criu_plugin) = \"[^\"]+' /etc/slurm-affinode/config.toml")
    paths = {line.partition('"')[2] for line in configured.splitlines()}
    assert len(paths) == 2
    assert paths <= set(listed)
    for name in NAMES:  # commands write nothing into their package
        assert machine.run(f"dpkg --verify {name}") == ""

    machine.run("rm -r /srv/demo; apt-get remove -qq slurm-affinode-node slurm-affinode-spank")
    machine.run("test ! -e /usr/bin/slurm-affinode && test ! -e /usr/lib/slurm-affinode && test -e /etc/slurm-affinode")
    machine.run(f"apt-get purge -qq --auto-remove {' '.join(NAMES)}")  # with what they needed
    left = {file for file in machine.files() - before if not file.startswith(tuple(CHANGED))}
    assert {file for file in left if not file.startswith("/var/lib/slurm-affinode")} == set()
    machine.run(
        "test ! -e /etc/slurm-affinode && test ! -e /etc/slurm/plugstack.conf.d && test ! -e /usr/lib/slurm-affinode"
    )

    check_rpms(machine)


def check_rpms(machine: Machine) -> None:
    """Inspect the rpm packages, and install them below a directory."""
    for name in NAMES:
        assert (
            "systemctl daemon-reload" in machine.run(f"rpm -qp --scripts /packages/{name}-[0-9]*.rpm")
            or "spank" in name
        )
    listed = machine.run("rpm -qlp /packages/slurm-affinode-node-[0-9]*.rpm").splitlines()
    assert {"/usr/bin/slurm-affinode", "/usr/lib/systemd/system/slurm-affinode-agent.service"} <= set(listed)
    assert not {"/usr", "/usr/bin", "/usr/lib", "/etc", "/usr/lib/systemd/system", "/usr/share/man/man1"} & set(listed)
    assert "/etc/slurm-affinode/config.toml" in machine.run("rpm -qcp /packages/slurm-affinode-node-[0-9]*.rpm")
    assert "/usr/bin/python3.11" in machine.run("rpm -qp --requires /packages/slurm-affinode-node-[0-9]*.rpm")
    conflicts = machine.run("rpm -qp --conflicts /packages/slurm-affinode-spank-*.rpm").splitlines()
    assert {f"slurm < {SLURM}", "slurm >= 24.12"} <= set(conflicts)
    machine.run("rpm --root /srv/root -i --nodeps --noscripts /packages/slurm-affinode-[ns]*.rpm")
    program = "/srv/root/usr/lib/slurm-affinode/bin/slurm-affinode"
    said = machine.run(f"PYTHONHOME= /srv/root/usr/lib/slurm-affinode/bin/python {program} --version")
    assert __version__ in said
    machine.run("test -e /srv/root/usr/lib64/slurm/slurm_affinode.so")


PLAYBOOK = """
cd /data/ansible && LC_ALL=C.UTF-8 ANSIBLE_ROLES_PATH=/deploy/ansible/roles ANSIBLE_NOCOLOR=1 \\
  ansible-playbook --inventory localhost, site.yml"""


@pytest.mark.timeout(1200, func_only=True)
def test_role_installs_a_machine_once(machine: Machine) -> None:
    """A check changes nothing, the first run installs, the second has nothing to change, and neither has a check."""
    machine.run("apt-get update -qq && apt-get install -qq --no-install-recommends ansible-core python3-apt systemd")
    before = machine.files()
    machine.run(f"{PLAYBOOK} --check")
    assert {file for file in machine.files() - before if "/root/.ansible" not in file} == set()

    assert recap(machine.run(PLAYBOOK))["changed"] > 0
    done = machine.run(PLAYBOOK)
    assert recap(done)["changed"] == 0, done
    done = machine.run(f"{PLAYBOOK} --check")
    assert recap(done)["changed"] == 0, done

    parsed = "import json, tomllib; print(json.dumps(tomllib.load(open('/etc/slurm-affinode/config.toml', 'rb'))))"
    config = json.loads(machine.run(f'python3 -c "{parsed}"'))
    assert config["prometheus"] == {"headers": {"X-Scope-OrgID": 'a "b" \u00e9'}}
    assert config["zombies"]["nodes"]["gpu-*"] == {"cores": 64, "gpus": 4, "memory_gib": 512}
    assert config["suspend"]["dry_run"] is True
    assert config["suspend"]["tiers"] == {"memory": "/dev/shm/images"}  # noqa: S108 - a value, not a file
    machine.run(f"test -x {config['suspend']['shepherd']} && test -e {config['suspend']['criu_plugin']}")
    assert "configuration " in machine.run("slurm-affinode doctor", 3)
    assert "/etc/slurm-affinode/config.toml" in machine.run("slurm-affinode doctor", 3)
    modes = machine.run("cd /etc; stat -c '%a %U %G' slurm-affinode/image.key slurm-affinode/config.toml")
    assert modes == "600 root root\n640 root slurm-affinode\n"
    assert machine.run("/etc/slurm/prolog.d/20-slurm-affinode; cat /etc/slurm/plugstack.conf").endswith(
        "include /etc/slurm/plugstack.conf.d/*.conf\n"
    )
    [line] = machine.run("grep ^optional /etc/slurm/plugstack.conf.d/slurm-affinode.conf").splitlines()
    assert line == "optional slurm_affinode.so min_window=5m store=/srv/shared/slurm-affinode/images"
    targets = json.loads(machine.run("cat /etc/prometheus/slurm-affinode/targets.json"))
    assert targets == [{"labels": {"cluster": "alpha"}, "targets": ["gpu01:9402", "gpu02:9402"]}]
    rules = {path.name for path in (REPOSITORY / "deploy" / "prometheus").glob("*.rules.yml")}
    assert set(machine.run("ls /etc/prometheus/slurm-affinode").split()) == rules | {"targets.json"}


def recap(output: str) -> dict[str, int]:
    """Return the counts in the last line of a run."""
    return {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", output.strip().splitlines()[-1])}


@pytest.mark.timeout(1200, func_only=True)
def test_image_of_the_report_machine_runs_without_rights(packages: Path) -> None:
    """As another user than root, without capabilities, and with a read-only root file system."""
    tag = f"slurm-affinode-test:{os.getpid()}"
    file = REPOSITORY / "deploy" / "container" / "Containerfile"
    build = ["--build-arg", f"BASE={image('bookworm')}", "--build-arg", f"PACKAGES={packages.name}"]
    subprocess.run(
        ["docker", "build", "--quiet", "--file", file, "--tag", tag, *build, packages.parent], check=True, timeout=900,
        stdout=sys.stderr,
    )  # fmt: skip
    confined = ["docker", "run", "--rm", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL"]
    confined += ["--security-opt=no-new-privileges"]

    def run(*arguments: str, entrypoint: str = "slurm-affinode") -> str:
        argv = [*confined, f"--entrypoint={entrypoint}", tag, *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        assert run("-u", entrypoint="id") == "64900\n"
        assert run("--version") == f"slurm-affinode, version {__version__}\n"
        assert "demo/report.html" in run("demo", "--out", "/var/lib/slurm-affinode/demo")
    finally:
        subprocess.run(["docker", "rmi", "--force", tag], check=True, timeout=60, stdout=sys.stderr)
