"""Bodies of webhooks: a mail as a message in Slack, Mattermost or Microsoft Teams, or as plain JSON.

Chat services show the subject and the text. Text of users is escaped, so that it has no effect as markup, link or
mention.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slurm_affinode.model.cleanup import WebhookFormat
from slurm_affinode.report import format as fmt
from slurm_affinode.report.mail import Digest, shown

SLACK_HEADER, SLACK_BLOCK, SLACK_TEXT = 150, 3000, 12_000
"""Maximum characters of a header block and of the text of a section block (Block Kit), and of all blocks of a message.
The last is not documented; messages of 13,200 characters were refused as ``msg_blocks_too_long``."""
MATTERMOST_TEXT = 16_383
"""Maximum characters of a post, Mattermost 5.0 and newer."""
TEAMS_BYTES = 27_000
"""Maximum size of a message; Teams refuses more than 28 KB."""
_CUT = "[...]"
_LINE = 500
"""Maximum characters of a line: escaped, it fits into a block."""


def webhook_body(digest: Digest, form: WebhookFormat) -> Mapping[str, Any]:
    """Return the JSON value to send. Long text is cut at the end of a line, and ends in ``[...]``."""
    return _BODIES[form](digest)


def _plain(digest: Digest) -> dict[str, Any]:
    return {"to": digest.recipient, "user": digest.user, "subject": digest.subject, "text": digest.text,
            "html": digest.html}  # fmt: skip


def _slack(digest: Digest) -> dict[str, Any]:
    """https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks and /reference/block-kit/blocks."""

    def escaped(text: str) -> str:
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("```", "'''")

    subject = shown(digest.subject, SLACK_HEADER)
    room = SLACK_TEXT - len(subject)
    sections: list[str] = []
    for line in _limited((escaped(line) for line in _lines(digest)), room):
        if sections and len(sections[-1]) + len(line) < SLACK_BLOCK - 2 * len("```\n"):
            sections[-1] += f"\n{line}"
        else:
            sections.append(line)
    blocks = [{"type": "header", "text": {"type": "plain_text", "text": subject, "emoji": False}}]
    blocks += [
        {"type": "section", "text": {"type": "mrkdwn", "text": f"```\n{section}\n```", "verbatim": True}}
        for section in sections
    ]
    return {"text": escaped(subject), "blocks": blocks}


def _mattermost(digest: Digest) -> dict[str, Any]:
    """https://developers.mattermost.com/integrate/webhooks/incoming."""
    title = "".join(f"\\{c}" if c in "\\`*_{}[]()<>#+-.!|~:" else c for c in shown(digest.subject))
    title = title.replace("@", "@\N{ZERO WIDTH SPACE}")  # so that it is no mention
    room = MATTERMOST_TEXT - len(title) - len("#### \n```\n\n```")
    text = "\n".join(_limited((line.replace("```", "'''") for line in _lines(digest)), room))
    return {"text": f"#### {title}\n```\n{text}\n```"}


def _teams(digest: Digest) -> dict[str, Any]:
    """A message of the trigger *When a Teams webhook request is received* of Workflows, with an Adaptive Card.

    https://learn.microsoft.com/connectors/teams and https://adaptivecards.io/explorer. The text of a ``TextRun`` is not
    Markdown. Connectors of Office 365, and their ``MessageCard``, have been retired.
    """

    def line(text: str, **style: str) -> dict[str, Any]:
        run = {"type": "TextRun", "text": text.replace("  ", "\N{NO-BREAK SPACE}" * 2) or "\N{NO-BREAK SPACE}", **style}
        return {"type": "RichTextBlock", "spacing": "None", "inlines": [run]}

    def message(lines: list[str]) -> dict[str, Any]:
        body = [line(shown(digest.subject), weight="Bolder", size="Medium")]
        body += [line(text, fontType="Monospace") for text in lines]
        card = {
            "$schema": "http://adaptivecards.io/schemas/adaptive-card.json", "type": "AdaptiveCard", "version": "1.4",
            "body": body, "msteams": {"width": "Full"},
        }  # fmt: skip
        kind = "application/vnd.microsoft.card.adaptive"
        return {"type": "message", "attachments": [{"contentType": kind, "contentUrl": None, "content": card}]}

    lines = list(_limited(_lines(digest), TEAMS_BYTES))
    while len(json.dumps(message(lines))) > TEAMS_BYTES:
        lines = [*lines[: -2 if lines[-1] == _CUT else -1], _CUT]
    return message(lines)


def _lines(digest: Digest) -> Iterator[str]:
    """Yield the lines of the text, after the recipient: a channel has the messages to all of them."""
    yield f"To: {shown(digest.recipient)}"
    yield ""
    yield from (fmt.clip(line, _LINE) for line in digest.text.rstrip().splitlines())


def _limited(lines: Iterator[str], most: int) -> Iterator[str]:
    """Yield lines while they have fewer than ``most`` characters in total, with line ends; then ``[...]``."""
    room = most - len(_CUT)
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            yield _CUT
            return
        yield line


_BODIES: dict[WebhookFormat, Callable[[Digest], dict[str, Any]]] = {
    "json": _plain, "slack": _slack, "mattermost": _mattermost, "teams": _teams,
}  # fmt: skip
