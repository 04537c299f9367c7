"""The top of the report: the answer as a sentence, what stands out, the split bar and the cards."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.report import charts
from slurm_affinode.report import format as fmt
from slurm_affinode.report.context import Answer, Card
from slurm_affinode.report.measures import STATES, help_for, known, shown

_WHY_UNKNOWN = frozenset({"unmapped-gpus", "partly-mapped", "no-samples", "gaps", "no-activity-signal"})
"""Issues of the data quality that make time unknown."""
_MUCH = 0.2
"""Share of the allocated time from which its being unknown is told at the top."""


def answer(result: WasteResult) -> Answer:
    """The one sentence: how much was allocated, how much of it idle."""
    total = result.total
    allocated = known(total, "gpu_hours_allocated")
    if not allocated:
        return Answer("No GPU job ran in this interval.", "", "")
    capacity = known(total, "gpu_hours_capacity")
    of = "" if capacity is None else f"Of {fmt.number(capacity)} GPU-hours, "
    before = f"{of}{fmt.number(allocated)} {'' if of else 'GPU-hours '}were allocated to {_runs(total.get('jobs'))}. "
    idle, measured = known(total, "gpu_hours_idle"), known(total, "gpu_hours_measured")
    if idle is None or not measured:
        why = (
            "the GPU history fits none of these jobs" if result.quality.samples else "no GPU history covers these jobs"
        )
        return Answer(before, "How much of it was idle is unknown", f": {why}.")
    strong = f"{fmt.number(idle)} GPU-hours were idle"
    after = f", {fmt.percent(idle / allocated)} of the allocated"
    unknown = known(total, "gpu_hours_unknown")
    if measured < 0.995 * allocated and unknown:
        after += f"; {fmt.number(unknown)} ({fmt.percent(unknown / allocated)}) are unknown"
    after += "."
    cost = known(total, "idle_cost") if result.priced else None
    if cost:
        after += f" The idle hours cost {fmt.money(cost, result.currency)}."
    return Answer(before, strong, after)


def _runs(jobs: float | int | None) -> str:
    return "jobs" if jobs is None else "1 job run" if jobs == 1 else f"{fmt.count(jobs)} job runs"


def findings(result: WasteResult) -> tuple[str, ...]:
    """A few sentences on what stands out, most telling first."""
    total = result.total
    idle = known(total, "gpu_hours_idle")
    if not idle:
        return ()
    found = [_users_concentration(result, idle), _jobs_concentration(result, idle)]
    held, idle_held = known(total, "mem_gib_h"), known(total, "idle_mem_gib_h")
    if held and idle_held:
        found.append(
            f"{fmt.percent(idle_held / held)} of the GPU memory-time held by jobs was held while the GPU was idle "
            f"({fmt.gib_hours(idle_held)} of {fmt.gib_hours(held)})."
        )
    longest = known(total, "longest_idle_s")
    if longest:
        found.append(f"The longest time that one GPU stood idle within one job: {fmt.duration(longest)}.")
    found.append(_unknown(result))
    return tuple(text for text in found if text)


def _unknown(result: WasteResult) -> str:
    """Why a good part is unknown, where that is so: who sees the figure asks."""
    allocated, unknown = known(result.total, "gpu_hours_allocated"), known(result.total, "gpu_hours_unknown")
    reasons = [issue for issue in result.quality.issues if issue.code in _WHY_UNKNOWN and issue.gpu_hours]
    if not allocated or not unknown or unknown < _MUCH * allocated or not reasons:
        return ""
    most = max(reasons, key=lambda issue: issue.gpu_hours or 0.0)
    hours = min(most.gpu_hours or 0.0, unknown)
    title = most.title[0].lower() + most.title[1:]
    return f"{fmt.percent(hours / unknown)} of the unknown GPU-hours: {title}. Data quality, below, says what helps."


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
    """The bar of all allocated hours by state; the cards below it are its key."""
    allocated = known(result.total, "gpu_hours_allocated") or 0.0
    parts, said = [], []
    for state, label in STATES:
        value = known(result.total, f"gpu_hours_{state}")
        share = f", {fmt.percent(value / allocated)}" if value is not None and allocated else ""
        parts.append(charts.Series(label, [value], state))
        said.append(f"{label} {fmt.hours(value, 'GPU-h')}{share}")
    words = charts.Words("split", "Allocated GPU-hours by what the GPUs did", "; ".join(said) + ".")
    return charts.split(words, parts, value=lambda v: fmt.hours(v, "GPU-h"))


def cards(result: WasteResult) -> tuple[Card, ...]:
    """The figures below the bar."""
    total, currency = result.total, result.currency
    allocated = known(total, "gpu_hours_allocated")
    who = f"{fmt.count(total.get('users'))} user{'' if total.get('users') == 1 else 's'}"
    made = [
        _card(result, "gpu_hours_capacity", "Capacity", "allocated + not allocated"),
        _card(result, "unallocated_gpu_hours", "Not allocated", "held by no job"),
        _card(result, "gpu_hours_allocated", "Allocated", f"{_runs(total.get('jobs'))}, {who}"),
        *(_state_card(result, state, label, allocated) for state, label in STATES),
        _card(result, "idle_cost", "Cost of the idle hours", _of(shown(total, "cost", currency))),
        _card(result, "idle_mem_gib_h", "Memory held while idle", _of(shown(total, "mem_gib_h"))),
        _card(result, "idle_energy_kwh", "Energy while idle", _of(shown(total, "energy_kwh"))),
        _card(result, "util_mean_pct", "Mean utilization", "over time, where given"),
    ]
    if not result.priced:
        made = [c for c in made if c.label != "Cost of the idle hours"]
    if known(total, "gpu_hours_capacity") is None and known(total, "unallocated_gpu_hours") is None:
        made = [c for c in made if c.label not in ("Capacity", "Not allocated")]
    return tuple(made)


def _of(whole: str) -> str:
    return "" if whole == fmt.UNKNOWN else f"of {whole} in all"


def _card(result: WasteResult, key: str, label: str, sub: str, kind: str = "") -> Card:
    text = shown(result.total, key, result.currency)
    if text == fmt.UNKNOWN:
        return Card(label, text, "", "", help_for(key), kind, unknown=True)
    value, _, unit = (text, "", "") if key.endswith("cost") else text.partition(fmt.NBSP)
    return Card(label, value, unit, sub, help_for(key), kind)


def _state_card(result: WasteResult, state: str, label: str, allocated: float | None) -> Card:
    value = known(result.total, f"gpu_hours_{state}")
    share = f"{fmt.percent(value / allocated)} of allocated" if value is not None and allocated else ""
    return _card(result, f"gpu_hours_{state}", label, share, state)


def money_note(result: WasteResult) -> str:
    """What the amounts leave out, and where prices come from."""
    if not known(result.total, "gpu_hours_allocated"):
        return ""
    if not result.priced:
        if not result.price_note:
            return "No price is known for these GPUs: a price table in the configuration adds amounts of money."
        return "No amounts of money: the site has set no prices (price.table in the configuration)."
    notes = []
    missing: Sequence[str] = sorted(fmt.name(m) for m, price in result.prices.items() if price is None)
    if missing:
        listed = ", ".join(missing[:6]) + (", ..." if len(missing) > 6 else "")
        notes.append(f"Amounts leave out GPUs without a known price: {listed}.")
    return " ".join(notes)
