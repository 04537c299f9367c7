"""The conformance suite of Slurm clients: both clients on a slurmctld in memory, and the fakes of other tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import agent_site
import agent_stand_ins
import pytest
from conformance.slurm_client import ActionOutageSuite, OutageSuite, SlurmSite
from slurm_controller import Controller, InProcess, Programs, pyslurm

from slurm_affinode.slurm.commands_client import CommandsClient
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.slurm.pyslurm_client import PyslurmClient


def _changed(where: Any, name: str, value: object) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which an attribute has another value."""

    @contextmanager
    def changed() -> Iterator[None]:
        before = getattr(where, name)
        setattr(where, name, value)
        try:
            yield
        finally:
            setattr(where, name, before)

    return changed


def _commands(tmp_path: Path) -> SlurmSite:
    controller = Controller()
    return SlurmSite(
        CommandsClient(Programs(controller), env={}), controller.submit, _changed(controller, "down", True)
    )


def _pyslurm(tmp_path: Path) -> SlurmSite:
    controller = Controller()
    module = pyslurm(controller)
    client: SlurmClient = PyslurmClient(CommandsClient(Programs(controller), env={}), lambda: InProcess(module))
    return SlurmSite(client, controller.submit, _changed(controller, "down", True))


def _suspensions(tmp_path: Path) -> SlurmSite:
    world = agent_site.World(tmp_path)
    world.start_run("c1")

    def job(state: str) -> int:
        world.state = state
        return 7

    client: Any = agent_site.Slurm(world)
    return SlurmSite(client, job, _changed(world, "answers", False))


def _daemon(tmp_path: Path) -> SlurmSite:
    slurm = agent_stand_ins.Slurm()

    def job(state: str) -> int:
        number = 5 + len(slurm.all)
        slurm.all[number] = agent_stand_ins.job(number, state=state)
        return number

    return SlurmSite(slurm.client(), job, _changed(slurm, "down", True))


class TestQueries(OutageSuite):
    """The fake of the daemon's tests."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> SlurmSite:
        return _daemon(tmp_path)


class TestActions(ActionOutageSuite):
    """The two clients, and the fake of the suspensions' tests."""

    @pytest.fixture(params=[_commands, _pyslurm, _suspensions])
    def site(self, request: pytest.FixtureRequest, tmp_path: Path) -> SlurmSite:
        site: SlurmSite = request.param(tmp_path)
        return site
