"""The packages of ``make packages``: built on this machine, installed on a bare Debian 12, removed and purged.

Debian 12 has a Slurm for which the plugin cannot be built: its headers are those of Debian 13.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster.builds import PYTHON, image
from cluster.machines import Machine, container

from slurm_affinode import __version__
from slurm_affinode.base.extras import INSTALL

REPOSITORY = Path(__file__).resolve().parents[2]
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


def files(machine: Machine) -> set[str]:
    """Return all files of the machine but those of the package managers."""
    return set(machine.run(FILES).splitlines())


RELEASE = """
import sys
from pathlib import Path
from slurm_affinode.pipeline.plugin_check import exported
print(exported(Path(sys.argv[1]).read_bytes(), ['slurm_affinode_release']))
"""
"""Print the release that a plugin states."""


@contextmanager
def started(packages: Path, image_name: str, *command: str, options: Sequence[str] = ()) -> Iterator[Machine]:
    """Run a container; the packages are in /packages, and the folder ``deploy`` in /deploy."""
    volumes = {packages: "/packages", REPOSITORY / "deploy": "/deploy", REPOSITORY / "tests" / "data": "/data"}
    with container("affinode-packages", image_name, *command, volumes=volumes, options=options) as made:
        yield made


@pytest.fixture
def machine(packages: Path) -> Iterator[Machine]:
    """A bare Debian 12."""
    with started(packages, image("bookworm"), "sleep", "infinity", options=["--init"]) as container:
        yield container


BOOTED = (REPOSITORY / "deploy" / "ansible" / "molecule" / "default" / "Containerfile").read_text()
"""Debian 12 with systemd; the build argument PACKAGES adds Ansible."""
SYSTEMD = ["--cgroupns=private", "--cap-add=SYS_ADMIN", "--cap-add=NET_ADMIN", "--security-opt=seccomp=unconfined"]
SYSTEMD += ["--security-opt=apparmor=unconfined", "--tmpfs=/run", "--tmpfs=/run/lock", "--tmpfs=/tmp:exec"]
SYSTEMD += ["--env=container=docker", "--stop-signal=SIGRTMIN+3"]


def renumbered(package: Path, directory: Path) -> None:
    """Write a copy of a deb package with version 99.0 into a directory; the contents are the same."""
    steps = f"""
        mkdir control; dpkg-deb --control {package} control; sed -i 's/{__version__}/99.0/g' control/control
        tar -C control -czf control.tar.gz .; rm -r control; ar x {package} debian-binary data.tar.zst
        ar rc {package.name.replace(f"_{__version__}", "_99.0")} debian-binary control.tar.gz data.tar.zst
        rm debian-binary control.tar.gz data.tar.zst"""
    subprocess.run(["sh", "-ec", steps], cwd=directory, check=True, timeout=120)


@contextmanager
def built(text: str, name: str) -> Iterator[str]:
    """Build an image from the text of a Dockerfile; remove it at the end."""
    tag = f"slurm-affinode-{name}:{os.getpid()}"
    arguments = [f"--build-arg=BASE={image('bookworm')}", "--build-arg=PACKAGES=ansible-core"]
    argv = ["docker", "build", "--quiet", "--tag", tag, *arguments, "-"]
    subprocess.run(argv, input=text, text=True, check=True, timeout=600, stdout=sys.stderr)
    try:
        yield tag
    finally:
        subprocess.run(["docker", "rmi", "--force", tag], check=True, timeout=60, stdout=sys.stderr)


@contextmanager
def boot(packages: Path, image_name: str, *options: str) -> Iterator[Machine]:
    """Start a container in which systemd runs, and a unit with the name of Prometheus."""
    with started(packages, image_name, options=[*SYSTEMD, *options]) as container:
        container.run("for i in $(seq 60); do systemctl is-system-running --wait && exit; sleep 1; done; exit 1")
        container.run("systemctl start prometheus")
        yield container


@pytest.fixture
def booted(packages: Path, tmp_path: Path) -> Iterator[Machine]:
    """A Debian 12 where systemd runs, with Ansible; copies of the packages with a higher version are in /newer."""
    for package in packages.glob("*.deb"):
        renumbered(package, tmp_path)
    with (
        built(BOOTED, "booted") as tag,
        boot(packages, tag, f"--volume={tmp_path}:/newer:ro") as container,
    ):
        yield container


DNF = r"""
RUN apt-get install -qq --no-install-recommends createrepo-c dnf python3-dnf rpm >/dev/null
RUN printf '%s\n' 'Name: base' 'Version: 1' 'Release: 1' 'Summary: None' 'License: none' 'BuildArch: noarch' \
  'Provides: /bin/sh /usr/bin/python3 /usr/bin/python3.11 systemd' '%description' '%files' >/root/base.spec && \
  rpmbuild -bb /root/base.spec && rpm --force-debian -i /root/rpmbuild/RPMS/noarch/base-1-1.noarch.rpm && \
  createrepo_c /root/rpmbuild/RPMS && mkdir -p /etc/yum.repos.d && \
  printf '[local]\nname=local\nbaseurl=file:///root/rpmbuild/RPMS\ngpgcheck=0\n' >/etc/yum.repos.d/local.repo
CMD ["sh", "-c", "mount --make-rshared / && exec /sbin/init"]
"""
"""Debian's dnf, and a package that provides what the packages of RHEL would."""


@pytest.fixture
def booted_with_dnf(packages: Path) -> Iterator[Machine]:
    """As above, with dnf: no image of RHEL or Rocky is at hand."""
    text = BOOTED + DNF
    with built(text, "booted-dnf") as tag, boot(packages, tag) as container:
        yield container


@pytest.mark.timeout(1200, func_only=True)
def test_packages_are_installed_run_and_leave_nothing(machine: Machine) -> None:
    machine.run("rm -f /etc/dpkg/dpkg.cfg.d/docker*")  # which leaves out manual pages
    machine.run("apt-get update -qq && apt-get install -qq --no-install-recommends man-db rpm systemd python3")
    before = files(machine)

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
    assert __version__ in machine.run(f'/usr/lib/slurm-affinode/bin/python -c "{RELEASE}" {plugin}')
    configured = machine.run("grep -hoE '^(shepherd|criu_plugin) = \"[^\"]+' /etc/slurm-affinode/config.toml")
    paths = {line.partition('"')[2] for line in configured.splitlines()}
    assert len(paths) == 2
    assert paths <= set(listed)
    for name in NAMES:  # commands write nothing into their package
        assert machine.run(f"dpkg --verify {name}") == ""

    machine.run("rm -r /srv/demo; apt-get remove -qq slurm-affinode-node slurm-affinode-spank")
    machine.run("test ! -e /usr/bin/slurm-affinode && test ! -e /usr/lib/slurm-affinode && test -e /etc/slurm-affinode")
    machine.run(f"apt-get purge -qq --auto-remove {' '.join(NAMES)}")  # with what they needed
    left = {file for file in files(machine) - before if not file.startswith(tuple(CHANGED))}
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
    output = machine.run(f"PYTHONHOME= /srv/root/usr/lib/slurm-affinode/bin/python {program} --version")
    assert __version__ in output
    machine.run("test -e /srv/root/usr/lib64/slurm/slurm_affinode.so")


PLAYBOOK = """
cd /data/ansible && LC_ALL=C.UTF-8 ANSIBLE_ROLES_PATH=/deploy/ansible/roles ANSIBLE_NOCOLOR=1 \\
  ansible-playbook --inventory localhost, --connection local site.yml"""


@pytest.mark.timeout(1200, func_only=True)
def test_role_installs_changes_and_upgrades_a_machine(booted: Machine) -> None:
    """A check changes nothing, the first run installs, the second has nothing to change; all of it under systemd."""
    before = files(booted)
    booted.run(f"{PLAYBOOK} --check")
    assert {file for file in files(booted) - before if "/root/.ansible" not in file} == set()

    assert recap(booted.run(PLAYBOOK))["changed"] > 0
    done = booted.run(PLAYBOOK)
    assert recap(done)["changed"] == 0, done
    done = booted.run(f"{PLAYBOOK} --check")
    assert recap(done)["changed"] == 0, done
    check_settings(booted)
    check_services(booted)
    check_changes(booted)
    check_upgrade(booted)

    check_removal(booted, before)


@pytest.mark.nightly
@pytest.mark.timeout(1200, func_only=True)
def test_role_installs_rpm_packages(booted_with_dnf: Machine) -> None:
    """The tasks for dnf, with the facts of RHEL; removal by dnf leaves no unit behind."""
    playbook = f"{PLAYBOOK} --extra-vars format=rpm"
    before = files(booted_with_dnf)
    booted_with_dnf.run(f"{playbook} --check")
    assert {file for file in files(booted_with_dnf) - before if not file.startswith("/root/")} == set()
    assert recap(booted_with_dnf.run(playbook))["changed"] > 0
    done = booted_with_dnf.run(playbook)
    assert recap(done)["changed"] == 0, done
    check_settings(booted_with_dnf)
    check_services(booted_with_dnf)
    booted_with_dnf.run(f"dnf --quiet --assumeyes remove {' '.join(NAMES)}")
    assert booted_with_dnf.run("systemctl list-units --all --no-legend 'slurm-affinode*'") == ""
    booted_with_dnf.run("test ! -e /usr/lib/slurm-affinode && test -e /etc/slurm-affinode/image.key")


RULES = {
    "firewalld": "firewall-cmd --list-rich-rules",  # of the running firewall, after a reload
    "ufw": "ufw show added",
}
"""Firewall -> command that lists its rules."""


@pytest.mark.nightly
@pytest.mark.timeout(1200, func_only=True)
@pytest.mark.parametrize("firewall", sorted(RULES))
def test_role_adds_and_removes_rules_of_firewall(booted: Machine, firewall: str) -> None:
    """A check reports what a run would change, and changes nothing; a second run changes nothing."""
    booted.run(f"apt-get update -qq && apt-get install -qq --no-install-recommends {firewall}")
    playbook = PLAYBOOK.replace("site.yml", f"firewall.yml --extra-vars slurm_affinode_firewall={firewall}")
    before = booted.run(RULES[firewall])
    for command in (playbook, f"{playbook} --extra-vars slurm_affinode_state=absent"):
        present = booted.run(RULES[firewall])
        assert recap(booted.run(f"{command} --check"))["changed"] > 0
        assert booted.run(RULES[firewall]) == present
        assert recap(booted.run(command))["changed"] > 0
        for repeated in (command, f"{command} --check"):
            assert recap(booted.run(repeated))["changed"] == 0
        rules = booted.run(RULES[firewall])
        if command == playbook:
            assert all(source in rules for source in ("192.0.2.7", "2001:db8::7", "192.0.2.64/26"))
            assert rules.count("9402") == 2
    assert rules == before


def check_settings(machine: Machine) -> None:
    """Check the files that the role has written."""
    parsed = "import json, tomllib; print(json.dumps(tomllib.load(open('/etc/slurm-affinode/config.toml', 'rb'))))"
    config = json.loads(machine.run(f'python3 -c "{parsed}"'))
    assert config["prometheus"] == {"headers": {"X-Scope-OrgID": 'a "b" \u00e9'}}
    assert config["zombies"]["nodes"]["gpu-*"] == {"cores": 64, "gpus": 4, "memory_gib": 512}
    assert config["suspend"]["dry_run"] is True
    assert config["suspend"]["tiers"] == {"memory": "/dev/shm/images"}  # noqa: S108 - a value, not a file
    machine.run(f"test -x {config['suspend']['shepherd']} && test -e {config['suspend']['criu_plugin']}")
    assert "no mistakes" in machine.run("slurm-affinode doctor --only-config")
    modes = machine.run("cd /etc; stat -c '%a %U %G' slurm-affinode/image.key slurm-affinode/config.toml")
    assert modes == "600 root root\n640 root slurm-affinode\n"
    assert machine.run("/etc/slurm/prolog.d/20-slurm-affinode; cat /etc/slurm/plugstack.conf").endswith(
        "include /etc/slurm/plugstack.conf.d/*.conf\n"
    )
    [line] = machine.run("grep ^optional /etc/slurm/plugstack.conf.d/slurm-affinode.conf").splitlines()
    assert line == "optional slurm_affinode.so min_window=5m store=/srv/shared/slurm-affinode/images"
    targets = json.loads(machine.run("cat /etc/prometheus/slurm-affinode/targets.json"))
    assert targets == [{"labels": {"cluster": "alpha"}, "targets": ["gpu01:9402", "gpu02:9402"]}]
    ruleset = machine.run("nft list chain inet filter input")
    assert "ip saddr 192.0.2.64/26 tcp dport 9403 accept" in ruleset
    assert "ip6 saddr 2001:db8::7 tcp dport 9402 accept" in ruleset
    rules = {path.name for path in (REPOSITORY / "deploy" / "prometheus").glob("*.rules.yml")}
    assert set(machine.run("ls /etc/prometheus/slurm-affinode").split()) == rules | {"targets.json"}


SCRAPE = """
import sys, urllib.error, urllib.request
request = urllib.request.Request("http://127.0.0.1:9402/metrics")
try: urllib.request.urlopen(request)
except urllib.error.HTTPError as error: print(error.code)
request.add_header("Authorization", "Bearer a-token-of-the-test")
print("slurm_affinode_agent_up" in urllib.request.urlopen(request).read().decode())
"""
LISTENS = "timeout 60 bash -c 'until exec 3<>/dev/tcp/127.0.0.1/9402; do sleep 0.2; done' 2>/dev/null"
"""Wait for the exporter, whose unit is active when its process has started."""
IDENTITY = "systemctl show --property=MainPID --property=NRestarts slurm-affinode-agent slurm-affinode-exporter"


def check_services(machine: Machine) -> None:
    """Check that each unit works under its settings."""
    services = "slurm-affinode-agent slurm-affinode-exporter"
    machine.run(f"systemctl is-active {services} slurm-affinode-nightly.timer; test -e /run/reloaded")
    machine.run("! systemctl is-enabled slurm-affinode-zombies.timer")
    assert machine.run("systemd-analyze verify /usr/lib/systemd/system/slurm-affinode-*") == ""
    machine.run(LISTENS)
    assert machine.run(f"python3 -c '{SCRAPE}'").split() == ["401", "True"]
    machine.run(f"systemctl reload {services}")
    log = machine.run("journalctl --no-pager --identifier slurm-affinode-agent")
    assert "the configuration is reloaded: nothing has changed" in log
    machine.run("slurm-affinode demo --out /srv/demo && systemctl start slurm-affinode-nightly")
    assert machine.run("stat -c %U /var/lib/slurm-affinode/reports/index.html") == "slurm-affinode\n"
    assert machine.run(IDENTITY).count("NRestarts=0") == 2


def check_changes(machine: Machine) -> None:
    """Check that settings which change restart what reads them, and that mistakes change nothing."""
    config = machine.run("cat /etc/slurm-affinode/config.toml")
    identity = machine.run(IDENTITY)
    for variables, reason in {
        '{"slurm_affinode_packaged_config": {"suspend": {"dry": 1}}}': "suspend.dry: unknown key",
        '{"slurm_affinode_roles": ["gpu"]}': "must be one or more of: report, node, login, prometheus",
        '{"slurm_affinode_image_key": "short"}': "slurm_affinode_image_key has at least 32 characters",
    }.items():
        done = machine.run(f"{PLAYBOOK} --extra-vars '{variables}'", 2)
        assert reason in done
        assert recap(done)["changed"] == 0
    assert machine.run("cat /etc/slurm-affinode/config.toml") == config
    assert machine.run(IDENTITY) == identity

    plugin = "/usr/libexec/slurm-affinode-criu/device_files.so"
    packaged = {"shepherd": "/usr/libexec/slurm-affinode-shepherd", "criu_plugin": plugin, "min_run": "20m"}
    variables = {"slurm_affinode_packaged_config": {"suspend": packaged}, "slurm_affinode_exporter_token": ""}
    assert recap(machine.run(f"{PLAYBOOK} --extra-vars '{json.dumps(variables)}'"))["changed"] > 0
    changed = machine.run(IDENTITY)
    assert set(changed.split()) & set(identity.split()) == {"NRestarts=0"}, "both services were to be restarted"
    machine.run(LISTENS)
    machine.run("python3 -c 'import urllib.request; urllib.request.urlopen(\"http://127.0.0.1:9402/metrics\")'")


def check_upgrade(machine: Machine) -> None:
    """Check that the role upgrades all packages at once, and that it refuses to go back."""
    identity = machine.run(IDENTITY)
    newer = "{{ query('fileglob', '/newer/*.deb') }}"
    machine.run(f'printf \'slurm_affinode_package_files: "%s"\' "{newer}" >/srv/newer.yml')
    assert recap(machine.run(f"{PLAYBOOK} --extra-vars @/srv/newer.yml"))["changed"] > 0
    versions = machine.run("dpkg-query --show --showformat '${Version} ' " + " ".join(NAMES))
    assert versions.split() == ["99.0-1", "99.0-1", f"99.0+slurm{SLURM}-1"]
    assert set(machine.run(IDENTITY).split()) & set(identity.split()) == {"NRestarts=0"}
    assert "Packages were downgraded" in machine.run(PLAYBOOK, 2)


KEYS_AND_DATA = json.dumps({"slurm_affinode_remove_keys": True, "slurm_affinode_remove_data": True})
JOURNAL = "/var/lib/slurm-affinode/journal"
IMAGE = """
from pathlib import Path
from slurm_affinode.checkpoint.image.manifest import load_key
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.model.suspension import JobKey, Manifest, SuspendOption, Versions
key = JobKey("alpha", 123, 5)
store = DirectoryStore(Path("STORE"), load_key(Path("/etc/slurm-affinode/image.key"), owner=0))
with store.begin(key, uid=65534, estimate=0) as writer:
    Path(f"/proc/self/fd/{writer.criu_fd}/pages-1.img").write_bytes(b"memory")
    writer.commit(Manifest(
        key=key, seq=0, uid=65534, gid=65534, node="c1", restarts=0, started_epoch=1.0, dumped_epoch=2.0,
        option=SuspendOption(), versions=Versions("0", "6", "4.2"), root_pid=2, cuda_pids=(), gpus=(), gpu_bytes=0,
        outputs=(), files=(),
    ))
"""
"""Write an image of a suspended job into a store."""


def check_removal(machine: Machine, before: set[str]) -> None:
    """Check that the role removes what it has written, and keeps what a job or an administrator still needs."""
    remove = f"{PLAYBOOK} --extra-vars slurm_affinode_state=absent"
    local, shared = "/var/lib/slurm-affinode/images", "/srv/shared/slurm-affinode/images"
    for store in (local, shared):
        script = IMAGE.replace("STORE", store)
        machine.run(f"cat >/srv/image.py <<'END'\n{script}\nEND\n/usr/lib/slurm-affinode/bin/python /srv/image.py")
        if store == local:
            machine.run(f"mkdir -p {JOURNAL} && touch {JOURNAL}/alpha.124.5.jsonl")
            done = machine.run(remove, 2)
            assert "job alpha.124 is suspended or asleep on this machine; the image of job 123 is on this" in done
            assert recap(done)["changed"] == 0
            machine.run(f"rm {JOURNAL}/alpha.124.5.jsonl")

    machine.run("cp /etc/slurm/prolog.d/20-slurm-affinode /srv/hook")
    present = files(machine)
    assert recap(machine.run(f"{remove} --check"))["changed"] > 0
    assert files(machine) == present
    assert recap(machine.run(remove))["changed"] > 0
    assert machine.run("systemctl list-units --all --no-legend 'slurm-affinode*'") == ""
    assert machine.run("/srv/hook 2>/dev/null") == ""  # no node is drained
    assert "9402" not in machine.run("nft list ruleset; cat /etc/nftables.conf")
    left = {file for file in files(machine) - before if not file.startswith(("/srv/", "/root/", *CHANGED))}
    kept = ("/var/lib/slurm-affinode", "/var/lib/private/slurm-affinode-exporter/")
    assert {file for file in left if not file.startswith(kept)} == {
        "/etc/slurm-affinode/exporter.token", "/etc/slurm-affinode/image.key", "/etc/slurm/plugstack.conf",
    }  # fmt: skip
    assert any(file.startswith(f"{local}/alpha.123/") for file in left)
    machine.run("grep -c . /etc/slurm/plugstack.conf", 1)

    # Nothing else has changed in this second run: the keys and data, and their directory.
    assert recap(machine.run(f"{remove} --extra-vars '{KEYS_AND_DATA}'"))["changed"] == 2
    machine.run(
        "test ! -e /etc/slurm-affinode && test ! -e /var/lib/slurm-affinode && ! ls -d /var/lib/*/slurm-affinode*"
    )
    machine.run(f"test -e {shared}/alpha.123")


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
