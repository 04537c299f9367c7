"""Messages for Slack, Mattermost and Teams: documented schemas and limits, and text of users without effect."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from slurm_affinode.report.mail import Digest
from slurm_affinode.report.webhook import MATTERMOST_TEXT, SLACK_BLOCK, SLACK_HEADER, SLACK_TEXT, webhook_body

HOSTILE = "job <!channel> & ```` @all *b* [x](http://example.org)"
DIGEST = Digest("ops@example.org", None, f"2 jobs: {HOSTILE}", f"  4101   36 h\n\n{HOSTILE}\n", "<p>Text</p>")
LONG = replace(DIGEST, subject="s" * 999, text="\n".join(f"{n:5} {'<&' * 300}" for n in range(4000)))


def checked_slack(body: Any) -> list[str]:
    """Check a message against the rules of Block Kit and incoming webhooks; return the texts of its sections."""
    assert set(body) == {"text", "blocks"}
    assert 0 < len(body["text"]) <= SLACK_HEADER * 5
    header, *sections = body["blocks"]
    assert len(body["blocks"]) <= 50
    assert header["type"] == "header"
    assert header["text"]["type"] == "plain_text"
    assert 0 < len(header["text"]["text"]) <= 150
    for section in sections:
        assert set(section) == {"type", "text"}
        assert (section["type"], section["text"]["type"]) == ("section", "mrkdwn")
        assert 0 < len(section["text"]["text"]) <= 3000
    return [section["text"]["text"] for section in sections]


def checked_teams(body: Any) -> list[str]:
    """Check a message against the schema of the trigger and of Adaptive Cards 1.4; return its lines."""
    assert len(json.dumps(body).encode()) < 28 * 1024
    assert body["type"] == "message"
    [attachment] = body["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    card = attachment["content"]
    assert (card["type"], card["version"]) == ("AdaptiveCard", "1.4")
    assert card["$schema"] == "http://adaptivecards.io/schemas/adaptive-card.json"
    lines = []
    for block in card["body"]:
        assert block["type"] == "RichTextBlock"
        [run] = block["inlines"]
        assert run["type"] == "TextRun"
        assert set(run) <= {"type", "text", "weight", "size", "fontType"}
        assert run["text"]
        lines.append(run["text"])
    return lines


def test_json_has_all_parts_of_the_mail() -> None:
    assert webhook_body(DIGEST, "json") == {
        "to": "ops@example.org", "user": None, "subject": DIGEST.subject, "text": DIGEST.text, "html": DIGEST.html,
    }  # fmt: skip


def test_slack_message_escapes_text_of_users() -> None:
    body = webhook_body(DIGEST, "slack")
    [section] = checked_slack(body)
    assert section.startswith("```\nTo: ops@example.org\n\n  4101   36 h\n")
    assert section.count("```") == 2
    for text in (section, body["text"]):
        assert "&lt;!channel&gt; &amp;" in text
        assert not {"<", ">"} & set(text)


def test_mattermost_message_mentions_no_user() -> None:
    body = webhook_body(DIGEST, "mattermost")
    assert set(body) == {"text"}
    title, fence, *lines, end = body["text"].split("\n")
    assert title.startswith("#### 2 jobs\\: job \\<\\!channel\\>")
    assert "@all" not in title
    assert (fence, end) == ("```", "```")
    assert lines[:3] == ["To: ops@example.org", "", "  4101   36 h"]
    assert not [line for line in lines if "```" in line]


def test_teams_message_is_an_adaptive_card() -> None:
    """Its text is not Markdown, so that nothing is escaped; columns stay aligned."""
    subject, to, empty, first, *_, last = checked_teams(webhook_body(DIGEST, "teams"))
    assert subject == DIGEST.subject
    assert to == "To: ops@example.org"
    assert empty.isspace()
    assert first.replace("\N{NO-BREAK SPACE}", " ") == "  4101   36 h"
    assert last == HOSTILE
    assert "MessageCard" not in json.dumps(webhook_body(DIGEST, "teams"))


@pytest.mark.parametrize("text", [LONG.text, "\N{GRINNING FACE}" * 60_000, "\n" * 9000, ""])
def test_long_text_is_cut_at_the_limits(text: str) -> None:
    digest = replace(LONG, text=text)
    sections = checked_slack(webhook_body(digest, "slack"))
    assert sum(map(len, sections)) <= SLACK_TEXT + SLACK_BLOCK
    post = webhook_body(digest, "mattermost")["text"]
    assert len(post) <= MATTERMOST_TEXT
    lines = checked_teams(webhook_body(digest, "teams"))
    if text == LONG.text:
        assert sections[-1].endswith("\n[...]\n```")
        assert post.endswith("\n[...]\n```")
        assert lines[-1] == "[...]"
