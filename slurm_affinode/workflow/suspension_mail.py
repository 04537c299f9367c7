"""Sends one mail about a suspension: a process of its own, so that the agent stays small and waits for no mail server.

    python -P -m slurm_affinode.workflow.suspension_mail < REQUEST

``REQUEST`` is JSON: ``event`` (the fields of ``SuspensionMail``), ``policy`` (the file whose ``[mail]`` says how) and
``timezone``. Exit status 0: it was taken; else standard error has one line, and the status is that of the error.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.errors import AffinodeError, InputError
from slurm_affinode.model.suspension_mail import SuspensionMail
from slurm_affinode.report.suspension_mail import suspension_digest
from slurm_affinode.workflow.postman import postman


def send(request: str) -> None:
    """Make and send it. Raises ``AffinodeError``."""
    given = json.loads(request)
    path = Path(given["policy"])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", where=str(path), hint="its [mail] says how mails leave") from error
    mail = parse_policy(text, where=str(path), expand=lambda names: (names,)).mail
    digest = suspension_digest(SuspensionMail(**given["event"]), mail, timezone=given.get("timezone"))
    postman(mail, lambda: datetime.now(UTC))(digest)


def main() -> int:
    """Send the mail that standard input asks for; the exit status."""
    try:
        send(sys.stdin.read())
    except AffinodeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
