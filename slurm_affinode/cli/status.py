"""``slurm-affinode status``: jobs that may be suspended or are suspended."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import click

from slurm_affinode.agent.client import AnswerError
from slurm_affinode.agent.routing import Reach
from slurm_affinode.base.config import Config
from slurm_affinode.base.text import counted, size, span
from slurm_affinode.base.users import name_of_user
from slurm_affinode.cli.command import command
from slurm_affinode.cli.node_options import config_file, reach_of
from slurm_affinode.cli.options import clock, echo, json_option, print_json, print_table, warn
from slurm_affinode.core.wake_time import wake_time

_EPILOG = """\b
  slurm-affinode status                  your jobs with --gpu-suspend-idle; as root all jobs
  slurm-affinode status 123              one job: signals, idle window, next step
  slurm-affinode status --node c1        jobs watched by the agent of one node
  slurm-affinode status --json | jq -r '.jobs[] | select(.state == "suspended").job_id'

\b
Exit status: 0 done, 1 job unknown, not yours, or not suspendable, 3 no agent responds.
"""


@command(epilog=_EPILOG)
@click.argument("job", required=False)
@click.option("--node", "nodes", multiple=True, metavar="NODE", help="Query the agent of this node; may be repeated")
@json_option
@config_file
def status(*, config: Config, job: str | None, nodes: tuple[str, ...], as_json: bool) -> int:
    """Show suspended jobs and jobs that may be suspended, to their owners and to administrators.

    JOB is a job ID: 123 or 123_4. Shows each activity signal with its limit, the idle time, the next step, how the
    job was started, and for each mode whether it can be suspended, or every reason against it by name and the remedy.
    """
    if "" in nodes:
        raise click.BadParameter("it is empty", param_hint="--node")
    with reach_of(config) as reach:
        if job is not None:
            try:
                answer = reach.about(job, {"verb": "status"})
            except AnswerError as error:
                if as_json:
                    refusal = {"code": error.code, "text": str(error), "remedy": error.hint}
                    print_json({"jobs": [], "refusal": refusal})
                raise
            rows = answer["jobs"]
            if as_json:
                print_json(answer)
            else:
                for row in rows:
                    _show(row, dry_run=bool(answer.get("dry_run")))
            return 0
        return _status_of_nodes(reach, nodes, as_json=as_json)


def _status_of_nodes(reach: Reach, nodes: tuple[str, ...], *, as_json: bool) -> int:
    rows: dict[int, dict[str, Any]] = {}
    problems: dict[str, str] = {}
    answered = 0
    for node, answer in reach.everywhere(nodes, os.getuid(), user=name_of_user(os.getuid())):
        if isinstance(answer, str):
            problems[node] = answer
            continue
        answered += 1
        if causes := "; ".join(answer[key] for key in ("stopped", "silent") if answer.get(key)):
            problems[node] = causes
        for row in answer["jobs"]:
            # Every agent reports suspended jobs; for a running job, the response of its own node is preferred.
            if row["job_id"] not in rows or row["state"] != "suspended":
                rows[row["job_id"]] = row
    job_rows = [rows[job_id] for job_id in sorted(rows)]
    if as_json:
        print_json({"jobs": job_rows, "problems": problems})
    elif job_rows:
        print_table(
            ("job", "user", "node", "state", "idle", "GPU memory", "next"), (_line(row) for row in job_rows),
            right=("job", "GPU memory"), minor=("GPU memory", "user", "node"),
        )  # fmt: skip
    elif not problems:
        echo("No job of yours is watched or suspended.")
    if not as_json:
        for node, problem in sorted(problems.items()):
            warn(f"{node}: {problem}")
    return 3 if problems and not answered else 0


def _line(row: Mapping[str, Any]) -> tuple[object, ...]:
    if row["state"] == "suspended":
        idle, after = f"asleep {span(row['suspended_s'])}", row["failure"] or _wakes_up(row)
        image_text = f"{size(row['gpu_bytes'])} in its image"
    elif (in_place := row.get("in_place")) is not None and in_place["starting"]:
        idle, image_text, after = "", "", in_place["waits"] or ""
    elif in_place is not None:
        idle, image_text = f"asleep {span(in_place['asleep_s'])}", f"{size(in_place['gpu_bytes'])} in host memory"
        by_itself = (
            "wakes on a request" if in_place["wakes_on_request"] else _wakes(row["option"]["wake"], in_place["since"])
        )
        after = in_place["failure"] or in_place["waits"] or by_itself
    else:
        idle = "" if row["idle"] is None else f"{span(row['idle']['progress_s'])} of {span(row['idle']['window_s'])}"
        after = "" if row["next"] is None else row["next"]["text"]
        image_text = "" if row["memory_held_bytes"] is None else size(row["memory_held_bytes"])
    return row["shown_id"], row["user"], row["node"], row["state"], idle, image_text, after


def _show(row: Mapping[str, Any], *, dry_run: bool) -> None:
    if row["state"] == "suspended":
        pairs = _asleep(row)
    elif row.get("in_place") is not None:
        pairs = _in_place(row)
    else:
        pairs = _awake(row, dry_run=dry_run)
    echo(f"Job {row['shown_id']} of {row['user']} on {row['node']}: {row['state']}")
    for name, value in pairs:
        echo(f"  {name:<12} {value}")
    signals = [] if row["state"] == "suspended" or row["idle"] is None else row["idle"]["signals"]
    if signals:
        echo()
        print_table(
            ("of", "signal", "value", "limit", ""), (_signal(signal) for signal in signals), right=("value", "limit")
        )


def _signal(signal: Mapping[str, Any]) -> tuple[str, ...]:
    value = "unknown" if signal["value"] is None else f"{signal['value']:g}"
    return signal["of"], signal["name"], value, f"{signal['limit']:g}", signal["verdict"]


def _awake(row: Mapping[str, Any], *, dry_run: bool) -> list[tuple[str, str]]:
    option, idle, after = row["option"], row["idle"], row["next"]
    terms = f"window {span(option['window_s'])}, util {option['util_pct']:g} %, {option['mode']}, wake {option['wake']}"
    signal = f", signal {option['signal']}" if option["signal"] else ""
    pairs = [("option", f"{terms}, when {option['when']}{signal}")]
    gpus = (
        "not known yet" if row["gpus"] is None else ", ".join(f"{gpu['name']} ({gpu['uuid']})" for gpu in row["gpus"])
    )
    pairs.append(("GPUs", gpus))
    if row["memory_held_bytes"] is not None:
        pairs.append(("memory held", size(row["memory_held_bytes"])))
    if row["suspensions"]:
        pairs.append(("suspended", _times(row["suspensions"])))
    if row.get("restored") is not None:  # older agents do not report it
        pairs.append(("restored", _point(row["restored"])))
    if idle is not None:
        since = "" if idle["since"] is None else f", since {_time(idle['since'])}"
        pairs.append(("window", f"{span(idle['progress_s'])} of {span(idle['window_s'])} idle{since}"))
        if idle["broken_by"]:
            pairs.append(("last broken", idle["broken_by"]))
    if after is not None:
        pairs.append(("next", after["text"]))
        pairs += [
            ("against" if number == 0 else "", f"{refusal['code']}: {refusal['text']}")
            for number, refusal in enumerate(after["against"])
        ]
    if row.get("compatibility") is not None:  # older agents do not report it
        pairs += _compatibility(row["compatibility"])
    if row["last"] is not None:
        pairs.append(("last attempt", f"{_time(row['last']['at'])}: {row['last']['text']}"))
    if row.get("said"):
        pairs.append(("comment", row["said"]))
    if dry_run:
        pairs.append(("agent", "dry run: suspensions are only logged"))
    return pairs


def _point(restored: Mapping[str, Any]) -> str:
    """Return the point at which an attempt began, and the work lost with the attempt before it."""
    began = f"{_time(restored['at'])} on {restored['node']}"
    if restored["from_start"]:
        point = f"not: started from its beginning, {began}"
    else:
        point = f"{began}, from its checkpoint of {_time(restored['checkpoint'])}"
    if not restored["after_loss"]:
        return point
    lost = "the work since then" if restored["lost_s"] is None else f"{span(restored['lost_s'])} of work"
    return f"{point}; {lost} was lost with the attempt before"


def _compatibility(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the compatibility table that apply to a job, and its refusals in each mode."""
    pairs = [("started as", "; ".join(facts["kinds"]))]
    for mode, result in facts["modes"].items():
        name = mode
        if result["possible"]:
            pairs.append((name, "can be suspended"))
        for refusal in result["against"]:
            pairs.append((name, f"{refusal['code']}: {refusal['text']}"))
            if refusal["remedy"] is not None:
                pairs.append(("", f"remedy: {refusal['remedy']}"))
            name = ""
    return pairs


def _asleep(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    where = "any node can restore it" if row["where"] == "shared" else f"only {row['node']} can restore it so far"
    if row.get("tied_to"):
        where = f"it starts on {row['tied_to']} only, which has its local files"
    pairs = [
        ("since", f"{_time(row['since'])}, {span(row['suspended_s'])} ago"),
        ("why", row["why"]),
        # Neither size includes the other: memory that was never written takes no space in an image.
        ("GPU memory", f"{size(row['gpu_bytes'])}, given back"),
        ("image", f"{size(row['image_bytes'])} on disk, with the contents of host and GPU memory; {where}"),
        ("wake", _wakes_up(row) if _settled(row) else f"{_wakes_up(row)}; or: slurm-affinode wake {row['shown_id']}"),
    ]
    if row.get("local_files"):  # older agents do not report it
        pairs.append(("local files", row["local_files"]))
    if row.get("passed_over"):
        pairs.append(("passed over", f"tiers that did not take the image: {row['passed_over']}"))
    if row["suspensions"] > 1:
        pairs.append(("suspended", _times(row["suspensions"])))
    if row["failure"]:
        pairs.append(("failure", row["failure"]))
        if row.get("failures"):  # older agents and notes do not count them
            pairs.append(("", _retries(row)))
    elif row.get("release") and row.get("released") is False and not row.get("restoring_on"):
        times = "once" if row["releases"] == 1 else f"{row['releases']} times"
        pairs.append(("released", f"{times}, and held again without a restore; next after {_time(row['release'])}"))
    return pairs


def _retries(row: Mapping[str, Any]) -> str:
    """Return the number of failed restores of a job, and when the next one is."""
    count = counted(row["failures"], "failed restore")
    last = "" if row["failed"] is None else f", last at {_time(row['failed'])}"
    if row["retry"] is None:
        return f"{count}{last}; not retried automatically"
    remaining = "the last retry" if row["retries_left"] == 1 else f"{row['retries_left']} retries left"
    return f"{count}{last}; next try after {_time(row['retry'])} ({remaining})"


def _in_place(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    in_place = row["in_place"]
    if in_place["starting"]:
        return [("waits", f"to start, since {_time(in_place['asked'])}: {in_place['waits'] or 'its GPUs are checked'}")]
    # Users may not do that. The raw ID of an array task may be that of the array.
    resume = f"an operator resumes it with: scontrol resume {row['shown_id']}"
    pairs = [
        ("asleep", f"in place: {_sleeps(in_place)}"),
        ("since", f"{_time(in_place['since'])}, {span(in_place['asleep_s'])} ago"),
        ("GPU memory", f"{size(in_place['gpu_bytes'])} in host memory"),
    ]
    if in_place.get("limit_raised_bytes"):
        pairs.append(("memory limit", f"raised by {size(in_place['limit_raised_bytes'])} until it is awake"))
    if in_place.get("file_locks"):
        pairs.append(
            ("file locks", f"{in_place['file_locks']}, kept until it wakes; waiters on other nodes do not wake it")
        )
    if row["gpus"] is not None:
        pairs.append(("GPUs", ", ".join(f"{gpu['name']} ({gpu['uuid']})" for gpu in row["gpus"])))
    if in_place["asked"] is None:
        by_itself = "on a request" if in_place["wakes_on_request"] else _wakes(row["option"]["wake"], in_place["since"])
        pairs.append(("wakes", f"{by_itself}; or: slurm-affinode wake {row['shown_id']}"))
        if in_place.get("suspended_by_slurm"):
            pairs.append(("", f"Slurm has suspended it; {resume}"))
    else:
        pairs.append(("is to wake", f"since {_time(in_place['asked'])}: {in_place['asked_why']}"))
        stopped = f"for Slurm, which has suspended it during the wake; {resume}"
        back = stopped if in_place.get("suspended_by_slurm") else "no more: its memory is being restored"
        pairs.append(("waits", in_place["waits"] or back))
        if in_place["overdue"]:
            pairs.append(("overdue", "it has waited longer than the site's deadline"))
    if in_place["failure"]:
        pairs.append(("failure", f"not woken: {in_place['failure']}"))
    return pairs


def _sleeps(in_place: Mapping[str, Any]) -> str:
    """Return for example ``idle 15m, 48 GiB in host memory, wakes on a request``."""
    wakes = ", wakes on a request" if in_place["wakes_on_request"] else ""
    return f"{in_place['why']}, {size(in_place['gpu_bytes'])} in host memory{wakes}"


def _wakes_up(row: Mapping[str, Any]) -> str:
    """Return when a suspended job resumes. It is released only once its image is in the shared store."""
    if row.get("restoring_on"):
        return f"now: it is being restored on {row['restoring_on']}"
    if row.get("held_by_admin"):
        return "not before an administrator, who holds it, wakes or releases it"
    if row.get("released") and row["reason"] not in (None, "BeginTime"):  # possibly by scontrol, whatever its option
        return f"as soon as Slurm has room for it: it is released, and pending for {row['reason']}"
    if row.get("retry"):
        return f"after {_time(row['retry'])}, when its restore is retried"
    if row["wake"] == "now" and row["where"] == "node":
        return "as soon as the copy of its image to the shared store is complete"
    return _wakes(row["wake"], row["since"])


def _settled(row: Mapping[str, Any]) -> bool:
    """Return whether a wake request by the owner has no effect. Older agents do not report it."""
    return bool(row.get("restoring_on") or row.get("held_by_admin") or row.get("released"))


def _wakes(wake: str, since: float) -> str:
    """Return when a job suspended at ``since`` resumes, by its ``wake`` option; ``now``: a wake was requested."""
    texts = {
        "auto": "when GPUs are free and no job waits",
        "hold": "on request",
        "now": "as soon as Slurm has GPUs for it: it is released",
    }
    if wake in texts:
        return texts[wake]
    try:
        wake_at = wake_time(wake, since)
    except ValueError:
        return f"at {wake}"
    return f"at {_time(wake_at)} ({wake})"


def _times(count: int) -> str:
    return "once so far" if count == 1 else f"{count} times so far"


def _time(epoch: float) -> str:
    return clock(datetime.fromtimestamp(epoch, UTC), seconds=True)
