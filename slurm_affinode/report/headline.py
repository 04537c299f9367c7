"""The first part of a report: headline, figures by activity, findings, what to do."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from slurm_affinode.analysis import actions
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.analysis.working_hours import WorkingTime
from slurm_affinode.base.times import WEEKDAYS
from slurm_affinode.report import charts
from slurm_affinode.report import format as fmt
from slurm_affinode.report.context import ActionCard, Answer, Card
from slurm_affinode.report.links import NO_LINKS, Links
from slurm_affinode.report.measures import STATES, help_for, known_value, shown
from slurm_affinode.report.method_section import prose

_WHY_UNKNOWN = frozenset({"unmapped-gpus", "partly-mapped", "no-samples", "gaps", "no-activity-signal"})
"""Data quality issues that make time unknown."""
_MUCH = 0.2
"""Share of unknown time in the allocated time from which the report explains it at the top."""


def answer(result: WasteResult) -> Answer:
    """Return the headline: how much was allocated, and how much of it was idle."""
    total = result.total
    allocated = known_value(total, "gpu_hours_allocated")
    if not allocated:
        return Answer("No GPU job ran in this interval.", "", "")
    capacity = known_value(total, "gpu_hours_capacity")
    of = "" if capacity is None else f"Of {fmt.number(capacity)} GPU-hours, "
    before = f"{of}{fmt.number(allocated)} {'' if of else 'GPU-hours '}were allocated to {_runs(total.get('jobs'))}. "
    idle, measured = known_value(total, "gpu_hours_idle"), known_value(total, "gpu_hours_measured")
    if idle is None or not measured:
        why = "the GPU metrics match none of these jobs"
        if not result.quality.samples:
            why = "there are no GPU metrics of these jobs"
        return Answer(before, "How much of it was idle is unknown", f": {why}.")
    averaged = result.averaged
    strong = f"{'At least ' if averaged else ''}{fmt.number(idle)} GPU-hours were idle"
    after = f", {fmt.percent(idle / allocated)} of the allocated"
    unknown = known_value(total, "gpu_hours_unknown")
    if measured < 0.995 * allocated and unknown:
        after += f"; {fmt.number(unknown)} ({fmt.percent(unknown / allocated)}) are unknown"
    after += "."
    if averaged:
        after += " The metrics are averages per job: idle time within a job counts as low or busy."
    cost = known_value(total, "idle_cost") if result.priced else None
    if cost:
        after += f" The idle hours cost {fmt.money(cost, result.currency)}."
    return Answer(before, strong, after)


def _runs(jobs: float | int | None) -> str:
    return "jobs" if jobs is None else "1 job run" if jobs == 1 else f"{fmt.count(jobs)} job runs"


def consequences(result: WasteResult) -> str:
    """Return what suspensions would have returned, and who waited meanwhile; empty if both are unknown."""
    idle = known_value(result.total, "gpu_hours_idle")
    waited = _waited(result) if known_value(result.total, "gpu_hours_allocated") else ""
    return " ".join(text for text in (_suspensions(result, idle) if idle else "", waited) if text)


def findings(result: WasteResult) -> tuple[str, ...]:
    """Return a few sentences with further findings, the most important first."""
    total = result.total
    idle = known_value(total, "gpu_hours_idle")
    if not idle:
        return ()
    sentences = [_users_concentration(result, idle), _jobs_concentration(result, idle)]
    held_gib_hours, idle_held = known_value(total, "mem_gib_h"), known_value(total, "idle_mem_gib_h")
    if held_gib_hours and idle_held:
        sentences.append(
            f"{fmt.percent(idle_held / held_gib_hours)} of the GPU memory-time held by jobs was held while the GPU "
            f"was idle ({fmt.gib_hours(idle_held)} of {fmt.gib_hours(held_gib_hours)})."
        )
    longest = known_value(total, "longest_idle_s")
    if longest:
        sentences.append(f"The longest idle time of one GPU within one job: {fmt.duration(longest)}.")
    sentences.append(_unknown(result))
    return tuple(text for text in sentences if text)


def working_hours(result: WasteResult) -> str:
    """Return how much idle time fell in working hours and outside of them; empty if it is unknown."""
    outside = idle_outside(result)
    if outside is None or result.working_hours is None or result.query.working is None or result.averaged:
        return ""
    hours, share = outside
    inside, outside_hours = result.working_hours.iter_rows(named=True)
    span = fmt.percent(inside["hours"] / (inside["hours"] + outside_hours["hours"]))
    allocated = [row["gpu_hours_allocated"] for row in (inside, outside_hours)]
    shares = [row["gpu_hours_idle"] / row["gpu_hours_allocated"] for row in (inside, outside_hours) if all(allocated)]
    rates = "" if not shares else (
        f" Of the allocated GPU-hours, {fmt.percent(shares[0])} were idle in working hours, and "
        f"{fmt.percent(shares[1])} outside of them."
    )  # fmt: skip
    return (
        f"{fmt.percent(share)} of the idle GPU-hours ({fmt.hours(hours, 'GPU-h')}) were outside of working hours "
        f"({_working_time(result.query.working)}), which are {span} of the time.{rates}"
    )


def idle_outside(result: WasteResult) -> tuple[float, float] | None:
    """Return the idle GPU-hours outside of working hours, and their share of all idle ones; ``None`` if unknown."""
    if result.working_hours is None:
        return None
    inside, outside = (known_value(row, "gpu_hours_idle") for row in result.working_hours.iter_rows(named=True))
    if inside is None or outside is None or not inside + outside:
        return None
    return outside, outside / (inside + outside)


def _working_time(working: WorkingTime) -> str:
    """Return ``Monday to Friday, 08:00 to 18:00``."""
    days = [WEEKDAYS[day] for day in working.days]
    together = len(days) > 2 and working.days[-1] - working.days[0] == len(days) - 1
    day_text = f"{days[0]} to {days[-1]}" if together else ", ".join(days)
    return f"{day_text}, {' to '.join(working.clock)}"


def _suspensions(result: WasteResult, idle: float) -> str:
    bound = actions.suspension_bound(result)
    if bound is None or not bound.windows or result.averaged:
        return ""
    windows = "1 idle window was" if bound.windows == 1 else f"{fmt.count(bound.windows)} idle windows were"
    hours = f"{fmt.hours(bound.gpu_hours, 'GPU-h')}, {fmt.percent(bound.gpu_hours / idle)} of the idle time"
    return (
        f"Suspending jobs after {fmt.duration(actions.AFTER_S)} without activity would have returned at most {hours}: "
        f"{windows} longer. A job with several GPUs is suspended only while all of them are idle."
    )


def _waited(result: WasteResult) -> str:
    waits = result.waits
    if waits is None:
        return ""
    if not waits.waited:
        return "No GPU job that started meanwhile had waited for longer than a minute."
    share = f"{fmt.count(waits.waited)} of {fmt.count(waits.jobs)}"
    longest = "" if waits.waited == 1 else f" in the median, {fmt.duration(waits.longest_s)} at most"
    return (
        f"Meanwhile {share} GPU jobs waited for more than a minute before they started, "
        f"{fmt.duration(waits.median_s)}{longest}: {fmt.hours(waits.gpu_hours, 'GPU-h')} of requested GPUs."
    )


def action_cards(result: WasteResult, links: Links = NO_LINKS) -> tuple[ActionCard, ...]:
    """Return what to do: the owners and causes by which most GPU-hours can be returned; moved ones come last."""
    several = len({cluster for cluster in result.jobs["cluster"].unique() if cluster is not None}) > 1
    return tuple(_advice(action, links, several=several) for action in actions.actions(result))


def evidence(text: str, action: actions.ReturnAction, runs: str) -> str:
    """Return the evidence of an action from its text; ``runs``: their number in words."""
    utilization = None if action.utilization_pct is None else action.utilization_pct / 100
    return text.format(
        runs=runs, memory=fmt.quantity(action.memory_gib, "GiB"), longest=fmt.duration(action.longest_s),
        unused=fmt.count(action.gpus_unused), gpus=fmt.count(action.gpus), utilization=fmt.percent(utilization),
        model=fmt.clip(fmt.name(action.gpu_model), 40), model_memory=fmt.quantity(action.model_gib, "GiB"),
        smaller=fmt.clip(fmt.name(action.smaller_model), 40), smaller_memory=fmt.quantity(action.smaller_gib, "GiB"),
    )  # fmt: skip


def _amount(action: actions.ReturnAction) -> str:
    if action.hours_moved:
        return f"{fmt.hours(action.hours_moved, 'GPU-h')} to smaller GPUs"
    return f"at least {fmt.hours(action.hours_returned, 'GPU-h')}"


def _advice(action: actions.ReturnAction, links: Links, *, several: bool) -> ActionCard:
    text = actions.texts()[action.kind]
    job = str(action.job_id)
    if action.array_job_id is not None and action.array_task_id is not None:
        job = f"{action.array_job_id}_{action.array_task_id}"
    where = f" --cluster {fmt.name(action.cluster)}" if several and action.cluster is not None else ""
    return ActionCard(
        fmt.clip(fmt.name(action.user), 40), f"on {fmt.name(action.cluster)}" if several else "", text.title,
        _amount(action),
        evidence(text.evidence, action, _runs(action.runs)), prose(text.advice),
        f"slurm-affinode job {job}{where}", links.user(action.user),
        links.job({"cluster": action.cluster, "job_id": action.job_id}),
    )  # fmt: skip


def _unknown(result: WasteResult) -> str:
    """Return the main reason for unknown time if it is a large share, else an empty text."""
    allocated, unknown = (
        known_value(result.total, "gpu_hours_allocated"),
        known_value(result.total, "gpu_hours_unknown"),
    )
    reasons = [issue for issue in result.quality.issues if issue.code in _WHY_UNKNOWN and issue.gpu_hours]
    if not allocated or not unknown or unknown < _MUCH * allocated or not reasons:
        return ""
    most = max(reasons, key=lambda issue: issue.gpu_hours or 0.0)
    hours = min(most.gpu_hours or 0.0, unknown)
    title = most.title[0].lower() + most.title[1:]
    return (
        f"{fmt.percent(hours / unknown)} of the unknown GPU-hours: {title}. See the remedies under data quality, below."
    )


def _users_concentration(result: WasteResult, idle: float) -> str:
    frame = result.groups.get("user")
    if frame is None or frame.height < 4:
        return ""
    top = frame["gpu_hours_idle"].fill_null(0).head(3)
    if top[0] / idle >= 0.5:
        return f"One user of {fmt.count(frame.height)} accounts for {fmt.percent(top[0] / idle)} of the idle time."
    share = fmt.percent(float(top.sum()) / idle)
    return f"Three of {fmt.count(frame.height)} users account for {share} of the idle time."


def _jobs_concentration(result: WasteResult, idle: float) -> str:
    if result.jobs.height < 20:
        return ""
    hours = result.jobs["gpu_hours_idle"].fill_null(0).cum_sum()
    half = int((hours < idle / 2).sum()) + 1
    return f"Half of the idle time is in {_runs(half)} of {fmt.count(result.jobs.height)}."


def split(result: WasteResult) -> Markup:
    """Return the bar of all allocated hours by state; the cards below it are the legend."""
    allocated = known_value(result.total, "gpu_hours_allocated") or 0.0
    parts, sentences = [], []
    for state, label in STATES:
        value = known_value(result.total, f"gpu_hours_{state}")
        share = f", {fmt.percent(value / allocated)}" if value is not None and allocated else ""
        parts.append(charts.Series(label, [value], state))
        sentences.append(f"{label} {fmt.hours(value, 'GPU-h')}{share}")
    words = charts.Words("split", "Allocated GPU-hours by activity", "; ".join(sentences) + ".")
    return charts.split(words, parts, value=lambda v: fmt.hours(v, "GPU-h"))


def cards(result: WasteResult) -> tuple[Card, ...]:
    """Return the figures below the bar."""
    total, currency = result.total, result.currency
    allocated = known_value(total, "gpu_hours_allocated")
    who = f", {fmt.count(total.get('users'))} user{'' if total.get('users') == 1 else 's'}"
    if len(result.query.users) == 1:
        who = ""
    all_cards = [
        _card(result, "gpu_hours_capacity", "Capacity", "allocated + not allocated"),
        _card(result, "unallocated_gpu_hours", "Not allocated", "held by no job"),
        _card(result, "gpu_hours_allocated", "Allocated", f"{_runs(total.get('jobs'))}{who}"),
        *(_state_card(result, state, label, allocated) for state, label in STATES),
        _card(result, "idle_cost", "Cost of the idle hours", _of(shown(total, "cost", currency))),
        _card(result, "idle_mem_gib_h", "Memory held while idle", _of(shown(total, "mem_gib_h"))),
        _card(result, "idle_energy_kwh", "Energy while idle", _of(shown(total, "energy_kwh"))),
        *_emissions(result),
        _card(result, "util_mean_pct", "Mean utilization", "over time, where given"),
    ]
    if not result.priced:
        all_cards = [c for c in all_cards if c.label != "Cost of the idle hours"]
    if known_value(total, "gpu_hours_capacity") is None and known_value(total, "unallocated_gpu_hours") is None:
        all_cards = [c for c in all_cards if c.label not in ("Capacity", "Not allocated")]
    return tuple(all_cards)


def _emissions(result: WasteResult) -> tuple[Card, ...]:
    factor = result.emissions
    if factor is None:
        return ()
    label, help_text = "Emissions while idle", f"Energy of the idle GPUs x emissions of a kWh. {factor.rule}."
    text = fmt.emissions(factor.kg(known_value(result.total, "idle_energy_kwh")))
    if text == fmt.UNKNOWN:
        return (Card(label, text, "", "", help_text, unknown=True),)
    value, _, unit = text.partition(fmt.NBSP)
    return (
        Card(label, value, unit, _of(fmt.emissions(factor.kg(known_value(result.total, "energy_kwh")))), help_text),
    )


def _of(whole: str) -> str:
    return "" if whole == fmt.UNKNOWN else f"of {whole} in all"


def _card(result: WasteResult, key: str, label: str, sub: str, kind: str = "") -> Card:
    text = shown(result.total, key, result.currency)
    if text == fmt.UNKNOWN:
        return Card(label, text, "", "", help_for(key), kind, unknown=True)
    value, _, unit = (text, "", "") if key.endswith("cost") else text.partition(fmt.NBSP)
    return Card(label, value, unit, sub, help_for(key), kind)


def _state_card(result: WasteResult, state: str, label: str, allocated: float | None) -> Card:
    value = known_value(result.total, f"gpu_hours_{state}")
    share = f"{fmt.percent(value / allocated)} of allocated" if value is not None and allocated else ""
    return _card(result, f"gpu_hours_{state}", label, share, state)


def money_note(result: WasteResult) -> str:
    """Return a note on GPUs without a price, or on missing prices."""
    if not known_value(result.total, "gpu_hours_allocated"):
        return ""
    if not result.priced:
        if not result.price_note:
            return "No price is known for these GPUs: a price table in the configuration adds amounts of money."
        return "No amounts of money: the site has set no prices (price.table in the configuration)."
    notes = []
    missing: Sequence[str] = sorted(fmt.name(m) for m, price in result.prices.items() if price is None)
    if missing:
        missing_text = ", ".join(missing[:6]) + (", ..." if len(missing) > 6 else "")
        notes.append(f"Amounts leave out GPUs without a known price: {missing_text}.")
    return " ".join(notes)


def sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop; empty if it is empty."""
    return f"{text[0].upper()}{text[1:]}." if text else ""
