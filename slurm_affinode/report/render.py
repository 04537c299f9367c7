"""Rendering of templates to pages: one self-contained HTML file that needs no network, and no script to be read.

``page(template, title=..., **context)`` renders a template that extends ``base.html.j2``. Templates are in
``reports/templates``; they are autoescaped, undefined names are errors, and they compute nothing. The content security
policy of the page allows only its own style and script (by hash) and no connections.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Any

import jinja2
from markupsafe import Markup

from slurm_affinode import __version__
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.base.text import visible
from slurm_affinode.report import format as fmt


@dataclass(frozen=True, slots=True)
class Page:
    """Context of ``base.html.j2``."""

    title: str
    generated: str
    zone: str
    style: Markup
    script: Markup
    csp: str
    generator: str = f"slurm-affinode {__version__}"


@functools.cache
def environment() -> jinja2.Environment:
    """Return the template environment: strict, autoescaping."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(asset_dir("reports") / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def page(template: str, *, title: str, zone: tzinfo, generated: datetime | None = None, **context: Any) -> str:
    """Return the HTML of ``template`` (a file name in ``reports/templates``) with the names ``page`` and ``context``.

    ``zone`` is the time zone of its times, which the page names once.
    """
    style, script = _asset("style.css"), _asset("page.js")
    page = Page(
        title=visible(title),
        generated=fmt.moment(generated or datetime.now(UTC), zone),
        zone=str(zone),
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        csp=_policy(style, script),
    )
    return environment().get_template(template).render(page=page, **context)


@functools.cache
def _asset(name: str) -> str:
    return (asset_dir("reports") / "templates" / name).read_text(encoding="utf-8").strip()


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _source(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")
    return f"'sha256-{digest}'"
