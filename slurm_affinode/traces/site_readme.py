"""The README of an exported data set: what it contains, how it was made anonymous, and its figures."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_affinode.base.text import counted, percent, span
from slurm_affinode.traces.job_figures import JobLogSummary
from slurm_affinode.traces.site_trace import EPOCH_S, PRIORITY_CLASSES, QUEUE_STEP_S, VERSION, IdleFigures, SiteTrace

_TEXT = """# GPU jobs, idle windows and queue of a Slurm cluster

{jobs} of {users} on {gpus} within {within}, exported with `slurm-affinode export trace` (format version {version}).
Public traces of GPU clusters have either the queue or the use of the GPUs; this one has both.

## Files

| file | content |
| --- | --- |
| `jobs.csv` | GPU jobs that started and ended in the interval, one line each |
| `jobs.swf` | the same in the Standard Workload Format, version 2.2; processors are GPUs |
| `idle_windows.csv` | periods in which all GPUs of a job were idle |
| `queue.csv` | waiting and running jobs every {queue_step}, computed from the two tables above |
| `manifest.json` | version, parameters, SHA-256 of each file |

`jobs.csv`:

| column | meaning |
| --- | --- |
| `job` | number in this file, by submission |
| `user`, `account`, `partition` | pseudonyms; `other`: a partition whose requests were rare |
| `name` | pseudonym of user and job name: the same for repeated jobs of a user |
| `gpu_type` | type of the GPUs as requested; empty: not requested, or rare |
| `gpus` | allocated GPUs |
| `timelimit_s` | time limit; empty: none, unknown, or rare |
| `submit_s` | submission (when the job became eligible), seconds from {epoch} (Monday, 2001-01-01, UTC) |
| `wait_s`, `run_s` | from submission to start, and from start to end |
| `state` | `completed`, `canceled` or `failed` (also time limit and failed node) |
| `priority_class` | quarter of the jobs by the priority that accounting has recorded last: {classes} has the highest; \
empty: unknown, or rare |
| `measured` | 1: all GPUs of the job have samples; 0: whether they were idle is unknown |

`idle_windows.csv`: `job`, `begin_s`, `end_s` in seconds from the start of the job. Only jobs with `measured` 1 can
have windows: a job without samples is unknown, not busy. `queue.csv`: `at_s` as `submit_s`; `waiting_jobs`,
`waiting_gpus`, `running_gpus`, `idle_gpus` (GPUs of jobs that are in an idle window).

## Anonymity

- Names are keyed pseudonyms (HMAC-SHA256, 48 bits). Without the key they cannot be computed from names.
- Times are multiples of {round_s}, and shifted by whole weeks: weekday and hour are those of the site in UTC, the date
  is not.
- Each request (partition, GPU type, GPUs, time limit) was made by at least {least} users. Where fewer had made it, the
  time limit was removed ({timelimit}), then the GPU type ({gpu_type}), then the partition ({partition}).
- The class of the priority was removed from {priority_class}: a request has it if {least} users have made it with
  each of its classes.
- {suppressed} with a request that was still rare {were} left out, with {suppressed_share} of the GPU-hours.
- Node names, job IDs, command lines, directories and comments are not in the data.

What remains visible: how many jobs a pseudonym has submitted, and when, to {round_s}. Someone who knows the times of
some jobs of a user can recognize the pseudonym.

## Not in the data

{left_out}
- Jobs that were canceled before they started, and CPU jobs.
- GPU utilization beyond idle or not.

## Figures

`slurm-affinode trace site .` and `slurm-affinode trace swf jobs.swf` compute these figures from the files.

| figure | value |
| --- | --- |
| jobs | {job_count} |
| GPU-hours | {gpu_hours} |
| GPU-hours before rounding, with the jobs that were left out as rare | {exact_gpu_hours} |
| mean wait, s | {wait} |
| jobs with samples of all GPUs | {measured} |
| GPU-hours in idle windows, of those with samples | {idle_share} |
| GPU-hours idle in jobs while as many GPUs were waited for | {idle_while_waiting} |

## License

Add the license and the citation that your site wants before you publish it.
"""


def readme(
    trace: SiteTrace, jobs: JobLogSummary, idle: IdleFigures, left_out: Mapping[str, int], exact_gpu_hours: float
) -> str:
    """Return the README. ``left_out``: jobs of the site that are not in the data, by reason."""
    lost = trace.suppression
    generalized = {} if lost is None else lost.generalized
    suppressed = 0 if lost is None else lost.jobs
    rows = "\n".join(f"- {counted(count, 'job')} {reason}." for reason, count in left_out.items())
    return _TEXT.format(
        jobs=counted(jobs.jobs, "job"),
        users=counted(jobs.users or 0, "user"),
        gpus=counted(trace.capacity_gpus, "GPU"),
        within=span(jobs.span_s),
        version=VERSION,
        epoch=EPOCH_S,
        queue_step=span(QUEUE_STEP_S),
        least=trace.least_users,
        round_s=span(trace.round_s),
        suppressed=counted(suppressed, "job"),
        were="was" if suppressed == 1 else "were",
        suppressed_share=percent(0.0 if lost is None else lost.gpu_hours_share),
        **{
            name: counted(generalized.get(name, 0), "job")
            for name in ("timelimit_s", "gpu_type", "partition", "priority_class")
        },
        classes=PRIORITY_CLASSES,
        timelimit=counted(generalized.get("timelimit_s", 0), "job"),
        job_count=f"{jobs.jobs:,}",
        gpu_hours=f"{jobs.unit_hours:,.1f}",
        exact_gpu_hours=f"{exact_gpu_hours:,.1f}",
        wait="unknown" if jobs.wait_s is None else f"{jobs.wait_s.mean:,.0f}",
        measured=f"{idle.measured_jobs:,}",
        idle_share="unknown" if idle.idle_share is None else percent(idle.idle_share),
        idle_while_waiting=f"{idle.idle_while_waiting_gpu_hours:,.1f}",
        left_out=rows or "- No other GPU job.",
    )
