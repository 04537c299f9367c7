"""Local time: how people read a moment, and where the hours and days of their clock begin.

Everything is computed and stored in UTC. Pages, tables of a terminal and mails show times through ``shown``, in the
zone of the site (``cluster.timezone``), which each of them names once.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo

_HOUR_S, _DAY_S = 3600, 86400
_MOST_CHANGE = timedelta(hours=3)
"""A clock that is set back shows no time twice that is further away than this."""


def shown(moment: datetime, zone: tzinfo, *, seconds: bool = False) -> str:
    """``2026-11-01 08:00`` in ``zone``; in an hour that the clock shows twice, with the name of its offset."""
    local = moment.astimezone(zone)
    text = local.strftime("%Y-%m-%d %H:%M:%S" if seconds else "%Y-%m-%d %H:%M")
    return f"{text} {local:%Z}" if twice(local) else text


def named(moment: datetime, zone: tzinfo) -> str:
    """``2026-11-01 08:00 CET``: for a text that does not name the zone elsewhere."""
    return f"{moment.astimezone(zone):%Y-%m-%d %H:%M %Z}"


def twice(local: datetime) -> bool:
    """Whether the clock shows this local time twice that day."""
    return local.replace(fold=0).utcoffset() != local.replace(fold=1).utcoffset()


def edges(since: datetime, until: datetime, width_s: int, zone: tzinfo) -> list[datetime]:
    """The moments, in UTC, at which the local clock begins a span of ``width_s``, around the half-open interval.

    The first is at or before ``since``, the last at or after ``until``. ``width_s`` divides a day or is a multiple of
    it: days begin at local midnight, weeks on Monday, and a span in which the clock is changed is shorter or longer. An
    hour that the clock shows twice is two spans, unless the spans are longer than an hour.
    """
    width = timedelta(seconds=width_s)
    first, last = (moment.astimezone(zone).replace(tzinfo=None) for moment in (since, until))
    wall = first.replace(hour=0, minute=0, second=0, microsecond=0)
    if width_s == 7 * _DAY_S:
        wall -= timedelta(days=wall.weekday())
    elif width_s < _DAY_S:
        wall += (first - _MOST_CHANGE - wall) // width * width
    folds = (0, 1) if width_s <= _HOUR_S else (0,)
    found: set[datetime] = set()
    while wall <= last + _MOST_CHANGE + width:
        for fold in folds:
            moment = wall.replace(tzinfo=zone, fold=fold).astimezone(UTC)
            # A time that the clock skips is the moment of the change, by the offset before it.
            if fold == 0 or moment.astimezone(zone).replace(tzinfo=None) == wall:
                found.add(moment)
        wall += width
    ordered = sorted(found)
    begin = max(at for at in ordered if at <= since)
    end = min(at for at in ordered if at >= until)
    return [at for at in ordered if begin <= at <= end]
