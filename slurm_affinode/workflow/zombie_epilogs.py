"""What epilogs ended since the last run: the agents keep it until it is in the audit, where each report comes once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

from slurm_affinode.errors import AffinodeError
from slurm_affinode.model.audit import AuditEntry
from slurm_affinode.report.mail import shown
from slurm_affinode.store.zombies import ZombieLog
from slurm_affinode.workflow.zombie_recheck import AskNode

AT_ONCE = 32
HOLD = timedelta(minutes=10)


def collect(nodes: Iterable[str], ask: AskNode, cluster: str, log: ZombieLog, *, now: datetime, run: str,
            forget: bool = True) -> int:  # fmt: skip
    """Ask the agents; the number of reports that were new. A node that does not answer is asked in the next run.

    ``forget``: the agents need not keep what is in the audit now.
    """
    names = list(nodes)
    if not names:
        return 0

    def one(node: str) -> list[Mapping[str, Any]]:
        try:
            return list(ask(node, {"verb": "leftover-reports"}).get("reports", ()))
        except AffinodeError:
            return []

    with ThreadPoolExecutor(min(AT_ONCE, len(names))) as pool:
        reports = [report for found in pool.map(one, names) for report in found]
    taken = 0
    written: dict[str, list[str]] = {}
    for report in reports:
        claim = f"epilog|{report['node']}|{report['id']}"
        if log.claim(claim, run, now, HOLD):
            log.record([_entry(report, cluster, run)])
            log.settle(claim, run, now, None)
            taken += 1
        elif not log.settled(claim):
            continue
        written.setdefault(str(report["node"]), []).append(str(report["id"]))
    for node, ids in written.items() if forget else ():
        with contextlib.suppress(AffinodeError):  # it tells them again, and they are known by then
            ask(node, {"verb": "leftovers-taken", "ids": ids})
    return taken


def _entry(report: Mapping[str, Any], cluster: str, run: str) -> AuditEntry:
    left = [f"process {one['pid']} ({shown(str(one['command']), 80)}): {one['ended_by'] or 'still there'}"
            for one in report["left"]]  # fmt: skip
    dirty = [str(one) for one in report["dirty"]]
    drained = ["the node was drained"] if report.get("drained") else []
    return AuditEntry(
        at=datetime.fromtimestamp(float(report["at"]), UTC), run=run, actor=f"epilog@{report['node']}", verb="epilog",
        result="failed" if dirty else "done", reason="; ".join([*left, *dirty, *drained]), cluster=cluster,
        job_id=int(report["job"]), job=str(report["job"]), user=None, node=str(report["node"]), evidence=dict(report),
    )  # fmt: skip
