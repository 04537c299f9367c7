"""One cluster per test run (per worker of `pytest -n 5 --dist worksteal`), a clean queue per test, logs of failures.

- ``CLUSTER_NAME`` in the environment: use that cluster, start it if necessary, and leave it running. Otherwise the run
  starts a cluster of its own and removes it.
- ``SLURM_RELEASE``: 24.11 (default) or 26.05.
- ``CLUSTER_LOGS``: directory for the logs of failed tests (default ``out/cluster-logs``).

Without a Docker daemon the tests are skipped with that reason; with ``CI=true`` they fail.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import cleaners
from cluster.builds import builds, packages  # noqa: F401 - fixtures
from cluster.driver import SCRIPT, Cluster, script

UP_S = 1200.0
DOWN_S = 120.0
TEST_S = 300
SHOWN_LINES = 30
REPOSITORY = Path(__file__).resolve().parents[2]


EVERY_OTHER = {
    "test_outcome_and_output_after_a_signal_are_the_same", "test_unusable_shepherd_is_reported",
    "test_faulty_agent_does_not_stop_job", "test_workload_has_help", "test_restored_tree_resumes_where_it_stopped",
    "test_output_is_unchanged_by_suspension", "test_data_loaders_of_pytorch_resume_in_the_middle_of_an_epoch",
}  # fmt: skip
"""Tests with many similar cases, of which ``make test`` runs every other one, and ``make test-nightly`` the rest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limit the run time of each test without its fixtures, which have their own deadlines; mark nightly cases."""
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.timeout(TEST_S, func_only=True))
            name = item.name.partition("[")[0]
            if name in EVERY_OTHER:
                seen[name] += 1
                if seen[name] % 2 == 0:
                    item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session")
def docker() -> None:
    """Require a Docker daemon."""
    answered = subprocess.run((SCRIPT.parent / "ensure-docker.sh", "--check"), timeout=60, check=False).returncode == 0
    if not answered:
        reason = "no Docker daemon responds: start one with containers/ensure-docker.sh"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(docker: None) -> Iterator[Cluster]:
    """Return the running cluster."""
    kept = os.environ.get("CLUSTER_NAME")
    name = kept or f"affinode-test-{os.getpid()}"
    release = os.environ.get("SLURM_RELEASE", "24.11")
    started = script(("up",), name, release, UP_S)
    try:
        if started.returncode != 0:
            pytest.fail(f"the cluster did not start:\n{started.stderr}")
        made = Cluster(name, release)
        yield made
        made.close()
    finally:
        if not kept:
            script(("down",), name, release, DOWN_S)


@pytest.fixture(autouse=True)
def clean_queue(request: pytest.FixtureRequest) -> Iterator[None]:
    """Before each cluster test, cancel all jobs and wait for idle nodes; after a failure, collect the logs."""
    only_docker = "docker" in request.fixturenames and "cluster" not in request.fixturenames
    if request.node.get_closest_marker("cluster") is None or only_docker:
        yield
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    began = time.time()
    cluster.clear()
    cluster.scrape(on=request.node.get_closest_marker("scraped") is not None)
    yield
    report = request.node.stash.get(REPORT, None)
    if report is not None and report.failed:
        report.sections.extend(_collect(cluster, began, request.node.nodeid, report.longreprtext))


REPORT = pytest.StashKey[pytest.TestReport]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[Any]:
    """Keep the report of the test's call phase, for the fixture above to extend."""
    report = yield
    if call.when == "call":
        item.stash[REPORT] = report
    return report


def _collect(cluster: Cluster, began: float, test: str, failure: str) -> list[tuple[str, str]]:
    """Write all logs to files; return the last lines of each for the terminal.

    ``failure`` is written too: pytest does not print it for a test that passes when it is rerun.
    """
    directory = Path(os.environ.get("CLUSTER_LOGS", REPOSITORY / "out" / "cluster-logs"))
    directory = directory / re.sub(r"[^\w.-]+", "_", test.rpartition("/")[2])
    directory.mkdir(parents=True, exist_ok=True)
    logs = cluster.logs(began)
    for name, argv in {
        "squeue": ("squeue", "--all", "--long"),
        "sinfo": ("sinfo", "--Node", "--long"),
        "jobs": ("scontrol", "show", "job"),
        "outputs": ("sh", "-c", "tail -n 50 /home/*/slurm-*.out"),
    }.items():
        done = cluster.run("login", *argv)
        logs[name] = done.stdout + done.stderr
    for name, text in {**logs, "failure": failure}.items():
        (directory / f"{name}.log").write_text(text)
    shown = [(name, "\n".join(text.splitlines()[-SHOWN_LINES:])) for name, text in logs.items() if text.strip()]
    return [(f"{name} (all of it in {directory})", text) for name, text in shown]


@pytest.fixture
def leftovers_stay(cluster: Cluster) -> Iterator[None]:
    """Configure the epilog of c1 to leave leftover GPU processes of jobs running."""
    path = "/etc/slurm-affinode/zombies.toml"
    cluster.shell("c1", f"printf '[epilog]\\nkill = false\\n' > {path}")
    yield
    cluster.shell("c1", f"rm -f {path}")


@pytest.fixture
def administrator(cluster: Cluster) -> Iterator[None]:
    """Set up a database, a policy and a mail program for the test on the login node."""
    with cleaners.administrator(cluster):
        yield
