"""Sends one mail about a suspension, in a separate process: the agent stays small and waits for no mail server.

    python -P -m slurm_affinode.pipeline.suspension_mail < REQUEST

``REQUEST`` is JSON: ``event`` (the fields of ``SuspensionMail``), ``policy`` (the file with the ``[mail]`` section) and
``timezone``. The exit status is 0 if the mail was accepted; otherwise it is that of the error, and standard error has
one line.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.model.suspension import SuspensionMail
from slurm_affinode.pipeline.mail_delivery import postman
from slurm_affinode.report.suspension_mail import suspension_digest


def send(request: str) -> None:
    """Compose and send the mail. Raises ``AffinodeError``."""
    record = json.loads(request)
    path = Path(record["policy"])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot be read: {error}", where=str(path), hint="its section [mail] configures the delivery of mails"
        ) from error
    mail = parse_policy(text, where=str(path), expand=lambda names: (names,)).mail
    digest = suspension_digest(SuspensionMail(**record["event"]), mail, timezone=record.get("timezone"))
    postman(mail, lambda: datetime.now(UTC))(digest)


def main() -> int:
    """Send the mail requested on standard input; return the exit status."""
    try:
        send(sys.stdin.read())
    except AffinodeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
