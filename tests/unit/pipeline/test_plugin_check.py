"""``doctor`` on a node: the SPANK plugin against Slurm and against the agent."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from elf import library

from slurm_affinode import __version__
from slurm_affinode.base import columns
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.node_config import SuspendConfig
from slurm_affinode.base.process import Completed
from slurm_affinode.pipeline import plugin_check
from slurm_affinode.pipeline.checks import OK, PROBLEM, SKIPPED, Check
from slurm_affinode.suspension.job import announcements


def plugin(
    shepherd: Path, *, slurm: tuple[int, int] = (24, 11), release: str | None = __version__,
    announcement: int = announcements.VERSION,
) -> bytes:  # fmt: skip
    """Return a library with the constants of the plugin."""
    constants = {"plugin_version": (slurm[0] << 16 | slurm[1] << 8 | 5).to_bytes(4, "little")}
    if release is not None:
        constants["slurm_affinode_release"] = release.encode() + b"\0"
        constants["slurm_affinode_announcement"] = announcement.to_bytes(4, "little")
    return library(constants, more=b"\0" + bytes(shepherd) + b"\0")


@dataclass(frozen=True)
class Site:
    """A node with Slurm 24.11, the plugin and the shepherd."""

    root: Path
    suspend: SuspendConfig

    @property
    def line(self) -> Path:
        return self.root / "etc" / "plugstack.conf.d" / "affinode.conf"

    @property
    def plugin(self) -> Path:
        return self.root / "lib" / "slurm_affinode.so"

    def check(self, version: str = "24.11.5", **settings: str) -> Check:
        known = {"SLURM_CONF": f"{self.root}/etc/slurm.conf", "PlugStackConfig": "", "PluginDir": f"{self.root}/lib"}
        slurm = plugin_check.Installed(version, known | settings)
        return plugin_check.check(self.suspend, slurm, fallback=self.root / "sent")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    for name in ("etc/plugstack.conf.d", "lib", "libexec", "sent"):
        (tmp_path / name).mkdir(parents=True)
    shepherd = tmp_path / "libexec" / "slurm-affinode-shepherd"
    shepherd.write_bytes(b"")
    suspend = replace(SuspendConfig(), shepherd=shepherd, shared_store=Path("/shared/affinode/images"))
    site = Site(tmp_path, suspend)
    (tmp_path / "etc" / "plugstack.conf").write_text("include plugstack.conf.d/*.conf\n")
    site.line.write_text("optional slurm_affinode.so min_window=5m store=/shared/affinode/images/\n")
    site.plugin.write_bytes(plugin(shepherd))
    return site


def test_plugin_of_the_same_release_and_slurm_is_sound(site: Site) -> None:
    check = site.check()
    assert (check.name, check.status) == ("SPANK plugin", OK), check
    assert check.detail == f"{site.plugin}: release {__version__}, for Slurm 24.11"


def _no_line(site: Site) -> None:
    site.line.write_text("#optional slurm_affinode.so\n")


def _no_plugstack(site: Site) -> None:
    (site.root / "etc" / "plugstack.conf").unlink()


def _no_file(site: Site) -> None:
    site.plugin.unlink()


def _replaceable(site: Site) -> None:
    site.plugin.chmod(0o775)


def _other_slurm(site: Site) -> None:
    site.plugin.write_bytes(plugin(site.suspend.shepherd, slurm=(25, 5)))


def _other_announcements(site: Site) -> None:
    site.plugin.write_bytes(plugin(site.suspend.shepherd, release="0.1.0", announcement=1))


def _no_library(site: Site) -> None:
    site.plugin.write_text("#!/bin/sh\n")


def _other_library(site: Site) -> None:
    site.plugin.write_bytes(library({"other": b"x"}))


def _no_shepherd(site: Site) -> None:
    site.suspend.shepherd.unlink()


def _other_shepherd(site: Site) -> None:
    other = site.root / "libexec" / "other"
    other.write_bytes(b"")
    site.line.write_text(f"optional slurm_affinode.so shepherd={other} store=/shared/affinode/images\n")


def _other_compiled_shepherd(site: Site) -> None:
    site.plugin.write_bytes(plugin(Path("/usr/local/libexec/slurm-affinode-shepherd")))


def _no_store(site: Site) -> None:
    site.line.write_text("optional slurm_affinode.so store=/var/lib/slurm-affinode/images\n")


@pytest.mark.parametrize(
    ("change", "detail", "remedy"),
    [
        (_no_line, "no line loads slurm_affinode.so", "store=/shared/affinode/images"),
        (_no_plugstack, "cannot be read", "store=/shared/affinode/images"),
        (_no_file, "does not exist", "make -C spank install"),
        (_replaceable, "others? than root may write", "chmod go-w"),
        (_other_slurm, "built for Slurm 25.05, and this node has 24.11.5", "make -C spank clean install"),
        (_other_announcements, "writes announcements of version 1", "make -C spank install"),
        (_no_library, "is not a library", "make -C spank install"),
        (_other_library, "is not a plugin of Slurm", "make -C spank install"),
        (_no_shepherd, "slurm-affinode-shepherd does not exist", "make -C spank install"),
        (_other_shepherd, "the plugin starts .*/other", "suspend.shepherd ="),
        (_other_compiled_shepherd, "the plugin starts /usr/local/libexec", "suspend.shepherd ="),
        (_no_store, "does not name suspend.shared_store", "add store=/shared/affinode/images"),
    ],
)
def test_problem_has_its_remedy(site: Site, change: Callable[[Site], None], detail: str, remedy: str) -> None:
    change(site)
    check = site.check()
    assert check.status == PROBLEM, check
    assert re.search(detail, check.detail)
    assert check.hint is not None
    assert remedy in check.hint


@pytest.mark.parametrize("release", ["0.8.0", None])
def test_plugin_of_another_release_that_the_agent_reads_is_reported(site: Site, release: str | None) -> None:
    site.plugin.write_bytes(plugin(site.suspend.shepherd, release=release))
    check = site.check()
    assert check.status == SKIPPED
    assert f"of release {release or 'unknown'}" in check.detail
    assert "apt install" in (check.hint or "")


def dry(site: Site, store: Path) -> Site:
    """Return the site with ``suspend.dry_run`` and another shared store."""
    return replace(site, suspend=replace(site.suspend, dry_run=True, shared_store=store))


@pytest.mark.parametrize("change", [_no_line, _no_plugstack])
@pytest.mark.parametrize("exists", [False, True])
def test_dry_run_without_images_needs_no_line(site: Site, change: Callable[[Site], None], *, exists: bool) -> None:
    """The agent is installed before the plugin, with ``suspend.dry_run``; the hint says which line to add."""
    change(site)
    store = site.root / "images"
    if exists:
        store.mkdir()
    check = dry(site, store).check()
    assert check.status == SKIPPED
    assert check.detail.endswith("suspend.dry_run is set, and the shared store has no images")
    assert check.hint.startswith("before suspend.dry_run is removed: add to ")
    assert f"store={store}" in check.hint


def test_dry_run_with_images_needs_the_line(site: Site) -> None:
    """A job that was suspended before would start from the beginning on this node."""
    _no_line(site)
    store = site.root / "images"
    (store / "alpha.4711").mkdir(parents=True)
    assert dry(site, store).check().status == PROBLEM


def test_dry_run_with_store_that_is_not_mounted_needs_the_line(site: Site) -> None:
    """Whether it has images is unknown."""
    _no_line(site)
    assert dry(site, site.root / "shared" / "images").check().status == PROBLEM


def test_dry_run_does_not_excuse_a_line_with_a_mistake(site: Site) -> None:
    _no_file(site)
    assert dry(site, site.root / "images").check().status == PROBLEM


def test_file_sent_by_slurmctld_is_read(site: Site) -> None:
    """Nodes without configuration files have it in a directory of slurmd; a full path needs no ``PluginDir``."""
    _no_plugstack(site)
    (site.root / "sent" / "plugstack.conf").write_text(f"optional {site.plugin} store=/shared/affinode/images\n")
    assert site.check(PluginDir="/none").status == OK


def test_named_file_is_read(site: Site) -> None:
    named = site.root / "spank.conf"
    named.write_text("required slurm_affinode.so store=/shared/affinode/images\n")
    _no_plugstack(site)
    assert site.check(PlugStackConfig=str(named), PluginDir=f"/none:{site.root}/lib").status == OK


def test_slurm_without_response_leaves_the_plugin_unchecked(site: Site) -> None:
    def unreachable(argv: Any, **_: Any) -> Completed:
        raise UnreachableError("scontrol: timed out")

    assert plugin_check.installed(unreachable) is None
    assert plugin_check.check(site.suspend, None).status == SKIPPED


def test_lines_follow_includes_in_order(tmp_path: Path) -> None:
    """Patterns are relative to the file that includes them; comments, blank lines and other words are passed over."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "20-b.conf").write_text("optional /usr/lib/slurm/b.so  x=1 y  # z\n")
    (tmp_path / "more" / "10-a.conf").write_text("# required no.so\n\nrequired a.so\n")
    main = tmp_path / "plugstack.conf"
    main.write_text(f"include more/*.conf\ninclude {tmp_path}/none/*.conf\noptional c.so\noptional\n")
    lines = list(plugin_check.plugin_lines(main))
    assert [line.plugin for line in lines] == ["a.so", "/usr/lib/slurm/b.so", "c.so"]
    assert lines[1].arguments == ("x=1", "y")
    assert [line.file.name for line in lines] == ["10-a.conf", "20-b.conf", "plugstack.conf"]


def test_file_that_includes_itself_ends(tmp_path: Path) -> None:
    main = tmp_path / "plugstack.conf"
    main.write_text("optional a.so\ninclude plugstack.conf\n")
    assert {line.plugin for line in plugin_check.plugin_lines(main)} == {"a.so"}


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(plugin_check.plugin_lines(tmp_path / "plugstack.conf"))


def test_constants_are_read_from_where_they_are_loaded() -> None:
    data = library({"plugin_version": (0x180B05).to_bytes(4, "little"), "text": b"0.9.0\0", "other": b"x"})
    assert plugin_check.exported(data, ("plugin_version", "text", "missing")) == {
        "plugin_version": b"\x05\x0b\x18\0", "text": b"0.9.0\0",
    }  # fmt: skip


def test_library_of_the_linker_is_read() -> None:
    """A library that a compiler has made, with functions: their names are found, whatever their code is."""
    [path] = Path(columns.__file__).parent.glob("libcolumns.so")
    assert plugin_check.exported(path.read_bytes(), ("no such name",)) == {}


@pytest.mark.parametrize("data", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(100), library({"a": b"x"})[:200]])
def test_other_files_are_rejected(data: bytes) -> None:
    with pytest.raises(ValueError, match="library"):
        plugin_check.exported(data, ("a",))
