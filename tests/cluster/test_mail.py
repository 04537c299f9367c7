"""Mails about suspensions, sent by the agents of the cluster through the site's own program."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email import message_from_string, policy

import pytest
from cluster.driver import GPU_NODES, Cluster, wait_until
from cluster.servers import ask, fault, put_to_sleep, serve
from cluster.sleepers import BY_HAND, asleep, configured, finish, idle_job, wait_for_agents, wake

pytestmark = pytest.mark.cluster

BOX = "/root/mails"
POLICY = "/etc/slurm-affinode/zombies.toml"
SETUP = f"""
rm -rf {BOX} && mkdir -p {BOX}
printf '#!/bin/sh\\nm=$(mktemp {BOX}/XXXXXX) && cat >"$m" && mv "$m" "$m.mail"\\n' >{BOX}/take && chmod 755 {BOX}/take
cp -n {POLICY} {BOX}/policy 2>/dev/null
printf '[mail]\\nvia = "command"\\ncommand = ["{BOX}/take"]\\naddress = "{{user}}@example.org"\\n' >{POLICY}
"""
RESTORE = f"if [ -e {BOX}/policy ]; then mv {BOX}/policy {POLICY}; else rm -f {POLICY}; fi; rm -rf {BOX}"


@pytest.fixture
def mailed(cluster: Cluster) -> Iterator[None]:
    """Run agents that mail owners about all events."""
    wait_for_agents(cluster)
    for node in GPU_NODES:
        cluster.shell(node, SETUP)
    try:
        with configured(cluster, mail=["suspended", "restored", "failed"]):
            yield
    finally:
        for node in GPU_NODES:
            cluster.shell(node, RESTORE)


def subjects(cluster: Cluster) -> dict[str, str]:
    """Return the subject and text of each mail sent."""
    result = {}
    for node in GPU_NODES:
        for name in cluster.run(node, "sh", "-c", f"ls {BOX}/*.mail 2>/dev/null").stdout.split():
            mail = message_from_string(cluster.exec(node, "cat", name), policy=policy.default)
            assert mail["To"] == "alice@example.org"
            body = mail.get_body(("plain",))
            assert body is not None
            assert mail["Subject"] not in result, "an event is mailed once"
            result[str(mail["Subject"])] = body.get_content()
    return result


def wait_for_mail(cluster: Cluster, subject: str) -> str:
    """Return the text of the mail once it has arrived."""
    return wait_until(
        f"the mail {subject!r} has arrived", lambda: subjects(cluster), lambda seen: subject in seen, timeout_s=60
    )[subject]


@pytest.mark.usefixtures("mailed")
def test_owner_is_mailed_about_suspension_failure_and_restore(cluster: Cluster) -> None:
    """The driver fails in the first restore but not in the second; each of the three events is mailed."""
    job = asleep(cluster, idle_job("--job-name=training"), BY_HAND)
    text = wait_for_mail(cluster, f"[affinode] Job {job} is suspended")
    assert f"Job {job} (training): Suspended" in text
    assert f"slurm-affinode wake {job}" in text
    for node in GPU_NODES:
        cluster.exec(node, "gpu-emulatorctl", "fault", "restore-fails")
    try:
        wake(cluster, job)
        text = wait_for_mail(cluster, f"[affinode] Job {job} could not be restored and is held")
    finally:
        for node in GPU_NODES:
            cluster.exec(node, "gpu-emulatorctl", "fault", "clear")
    assert "Reason: " in text
    wait_until(
        "it is held", lambda: cluster.job(job), lambda seen: (seen["JobState"], seen["Priority"]) == ("PENDING", "0")
    )
    wake(cluster, job)
    assert "where it had stopped" in wait_for_mail(cluster, f"[affinode] Job {job} has resumed")
    finish(cluster, job)
    assert len(subjects(cluster)) == 3


@pytest.mark.usefixtures("mailed")
def test_owner_is_mailed_about_in_place_sleep_failure_and_wake(cluster: Cluster) -> None:
    """Each of the three events is mailed once, although the wake is retried."""
    server = serve(cluster, 8001)
    put_to_sleep(cluster, server.job)
    text = wait_for_mail(cluster, f"[affinode] Job {server.job} is suspended")
    assert "Asleep in place" in text
    assert "The next request wakes it." in text
    with ThreadPoolExecutor(1) as pool:
        with fault(cluster, "restore-fails"):
            request = pool.submit(ask, cluster, server.url)
            text = wait_for_mail(cluster, f"[affinode] Job {server.job} could not be woken and remains asleep")
            assert "Reason: cannot move the GPU memory of process" in text
        assert request.result()[0] == {"prediction": server.prediction, "number": 2}
    assert "It runs again on c1" in wait_for_mail(cluster, f"[affinode] Job {server.job} has resumed")
    assert len(subjects(cluster)) == 3
