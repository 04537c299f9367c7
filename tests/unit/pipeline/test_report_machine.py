"""The setup of the report machine: steps, idempotence, ownership, conflicts, and the rejection of bad names."""

from __future__ import annotations

import os
import shlex
import stat
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from slurm_affinode.base.errors import AffinodeError, ConfigError, UnreachableError
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.pipeline.report_machine import Account, Host, SetupRequest, SetupStep, prepare, with_settings

URL = "http://prometheus.example.org:9090"


class Machine:
    """A machine below a temporary directory, with programs that only take effect there."""

    def __init__(self, root: Path, *, failing: str | None = None) -> None:
        self.root, self.failing = root, failing
        self.user: Account | None = None
        self.commands: list[tuple[str, ...]] = []
        program = root / "opt/slurm-affinode"
        program.parent.mkdir(exist_ok=True)
        program.touch(mode=0o755)
        self.host = Host(
            root, lambda _: self.user, self.run, systemd_runs=True, program=program, python=Path("/bin/sh")
        )

    def run(self, argv: Sequence[str], _env: Mapping[str, str], _timeout_s: float) -> None:
        self.commands.append(tuple(argv))
        if argv[0] == self.failing:
            raise UnreachableError("status 1: no more users")
        if argv[0] == "useradd":
            # Another owner than root only where the test may change owners.
            self.user = Account(12345, 12345) if os.geteuid() == 0 else Account(os.geteuid(), os.getegid())
        elif argv[:2] == ("systemctl", "enable"):
            links = self.root / "etc/systemd/system/timers.target.wants"
            links.mkdir(parents=True, exist_ok=True)
            (links / argv[-1]).symlink_to(f"../{argv[-1]}")
        elif argv[:2] == ("systemctl", "disable"):
            (self.root / "etc/systemd/system/timers.target.wants" / argv[-1]).unlink()
        elif argv[0] == "runuser":
            reports = self.root / "var/lib/slurm-affinode/reports"
            reports.mkdir()
            (reports / "index.json").touch()
            assert self.user is not None
            for path in (reports, reports / "index.json"):
                os.chown(path, self.user.uid, self.user.gid)

    def prepare(self, *, act: bool = True, **request: object) -> dict[str, SetupStep]:
        steps = prepare(SetupRequest(**request), self.host, act=act)  # type: ignore[arg-type]
        return {step.name: step for step in steps}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a bare machine. Each directory above it can be entered, as ``/opt`` can."""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    return Machine(tmp_path)


def states(steps: Mapping[str, SetupStep]) -> set[str]:
    return {step.state for name, step in steps.items() if name != "program"}


def files(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_bare_machine_is_set_up_once(machine: Machine) -> None:
    """A dry run changes nothing, the second run neither."""
    before = files(machine.root)
    assert states(machine.prepare(act=False)) == {"would create"}
    assert (files(machine.root), machine.commands) == (before, [])
    steps = machine.prepare(prometheus=URL, timezone="Europe/Oslo")
    assert states(steps) == {"created", "present"}  # nothing to repair in a new directory
    config = tomllib.loads((machine.root / "etc/slurm-affinode/config.toml").read_text())
    assert (config["prometheus"]["url"], config["cluster"]["timezone"]) == (URL, "Europe/Oslo")
    state = (machine.root / "var/lib/slurm-affinode").stat()
    assert machine.user is not None
    assert (state.st_uid, stat.S_IMODE(state.st_mode)) == (machine.user.uid, 0o750)
    unit = (machine.root / "etc/systemd/system/slurm-affinode-nightly.service").read_text()
    shipped = (asset_dir("reports") / "systemd/slurm-affinode-nightly.service").read_text()
    assert [line for line in unit.splitlines() if "PATH=" not in line] == [
        line for line in shipped.splitlines() if "PATH=" not in line
    ]
    assert [argv[0] for argv in machine.commands] == ["useradd", "systemctl", "systemctl", "runuser"]
    machine.commands.clear()
    before = files(machine.root)
    assert states(machine.prepare(prometheus=URL, timezone="Europe/Oslo")) == {"present"}
    assert (files(machine.root), machine.commands) == (before, [])


def test_user_is_that_of_the_packages(machine: Machine) -> None:
    """Both use one definition: name, comment, home directory and shell."""
    machine.prepare()
    text = (asset_dir("reports") / "systemd/slurm-affinode.sysusers.conf").read_text()
    defined = set(shlex.split(text.splitlines()[-1])) - {"u", "-"}
    assert machine.commands[0][0] == "useradd"
    assert defined <= set(machine.commands[0])
    assert len(defined) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create files of root")
def test_files_of_root_are_given_to_the_user(machine: Machine) -> None:
    """An ingest by root before the setup made the nightly run fail. Links are not followed."""
    state = machine.root / "var/lib/slurm-affinode"
    (state / "history/gpu").mkdir(parents=True)
    (state / "history/gpu/part.parquet").touch()
    (state / "affinode.sqlite").touch()
    outside = machine.root / "outside"
    outside.touch()
    (state / "history/link").symlink_to(outside)
    planned = machine.prepare(act=False)
    assert planned["state directory"].state == "would change"
    assert "4 files" in planned["owner of reports and database"].detail
    steps = machine.prepare()
    assert steps["owner of reports and database"].state == "changed"
    owners = {path.lstat().st_uid for path in state.rglob("*") if not path.is_symlink()}
    assert machine.user is not None
    assert owners - {0} == {machine.user.uid}
    assert (state / "affinode.sqlite").stat().st_uid == machine.user.uid
    assert outside.stat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create files of root")
def test_directory_with_images_keeps_its_owner(machine: Machine) -> None:
    """The user of the nightly run could replace the images of an agent, which root restores."""
    state = machine.root / "var/lib/slurm-affinode"
    (state / "images").mkdir(parents=True)
    steps = machine.prepare()
    assert steps["state directory"].state == "failed"
    assert "images" in steps["state directory"].detail
    assert steps["timer"].state == "not done"
    assert state.stat().st_uid == 0
    other = machine.prepare(state_dir=Path("/srv/reports"))
    assert other["state directory"].state == "created"
    unit = (machine.root / "etc/systemd/system/slurm-affinode-nightly.service").read_text()
    assert "ReadWritePaths=-/srv/reports\n" in unit


def test_failed_step_stops_the_setup(tmp_path: Path, machine: Machine) -> None:
    """The steps after it are not done; each names the command that does it by hand."""
    failing = Machine(tmp_path, failing="useradd")
    steps = failing.prepare()
    assert steps["user"].state == "failed"
    assert "no more users" in steps["user"].detail
    assert {step.state for name, step in steps.items() if name not in ("program", "user")} == {"not done"}
    assert all(step.command for step in steps.values() if step.state != "present")
    assert not (machine.root / "etc/slurm-affinode").exists()


def test_configuration_of_the_site_is_extended(machine: Machine) -> None:
    """Comments, other keys and the mode are kept; another value is a conflict."""
    config = machine.root / "etc/slurm-affinode/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('# ours\n[prometheus]   # metrics\nmatch = ["a"]\n[store]\ndb = "postgresql:///x"\n')
    config.chmod(0o640)
    steps = machine.prepare(prometheus=URL)
    assert steps["configuration"].state == "changed"
    assert config.read_text().startswith(f'# ours\n[prometheus]   # metrics\nurl = "{URL}"\nmatch')
    facts = config.stat()
    assert machine.user is not None
    assert (stat.S_IMODE(facts.st_mode), facts.st_gid) == (0o640, machine.user.gid)
    conflict = machine.prepare(prometheus="http://other:9090")["configuration"]
    assert (conflict.state, config.read_text().count("other")) == ("failed", 0)
    assert URL in conflict.detail


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", '\n\n[prometheus]\nurl = "u"\n'),
        ("[prometheus]\n", '[prometheus]\nurl = "u"\n'),
        ('[prometheus]\n# url = "x"  # c\n[price]\n# url = "y"\n', '[prometheus]\nurl = "u"\n[price]\n# url = "y"\n'),
        ('[prometheus]\nurl = "other"\n', '[prometheus]\nurl = "other"\n'),
    ],
)
def test_setting_is_written_into_its_section(text: str, expected: str) -> None:
    """A commented line is replaced; a key with a value keeps it."""
    assert with_settings(text, {("prometheus", "url"): "u"}, where="f") == expected


@pytest.mark.parametrize("text", ["prometheus = {step = '30s'}\n", "[[prometheus]\n", "[prometheus.headers]\na = 1 ["])
def test_configuration_that_cannot_be_extended_is_rejected(text: str) -> None:
    """It is not rewritten with a guess."""
    with pytest.raises(ConfigError, match=r"^f(:\d+: not TOML|: cannot be extended): "):
        with_settings(text, {("prometheus", "url"): "u"}, where="f")


def test_crontab_and_timer_exclude_each_other(machine: Machine) -> None:
    """Two of them would make each report twice."""
    machine.prepare()
    steps = machine.prepare(systemd=False)
    assert (steps["crontab"].state, steps["timer disabled"].state) == ("created", "changed")
    cron = machine.root / "etc/cron.d/slurm-affinode"
    assert "17 4 * * * slurm-affinode slurm-affinode nightly\n" in cron.read_text()
    steps = machine.prepare()
    assert steps["crontab removed"].state == "changed"
    assert not cron.exists()


def test_units_of_the_package_are_used(machine: Machine) -> None:
    """They are copied only if this site needs other values."""
    units = machine.root / "usr/lib/systemd/system"
    machine.prepare(first_run=False)
    units.mkdir(parents=True)
    for name in ("slurm-affinode-nightly.service", "slurm-affinode-nightly.timer"):
        (machine.root / "etc/systemd/system" / name).rename(units / name)
    assert machine.prepare(first_run=False)["timer"].state == "present"
    steps = machine.prepare(first_run=False, state_dir=Path("/srv/reports"))
    assert steps["timer"].state == "created"


def test_program_that_its_user_cannot_run_is_reported(machine: Machine) -> None:
    """An environment below ``/root``, or whose Python is there."""
    machine.host.program.chmod(0o700)
    step = machine.prepare()["program"]
    assert (step.state, str(machine.host.program) in step.detail) == ("failed", True)
    assert machine.commands == []


@pytest.mark.parametrize(
    "request_", [{"user": "a b"}, {"user": "root"}, {"user": "x:y"}, {"user": "-x"}, {"config": Path("config.toml")},
                 {"state_dir": Path("state")}, {"state_dir": Path("/srv/a\nb")}],
)  # fmt: skip
def test_names_and_paths_are_checked(request_: dict[str, object]) -> None:
    """They are written into units, a crontab and commands."""
    with pytest.raises(AffinodeError):
        SetupRequest(**request_)  # type: ignore[arg-type]
