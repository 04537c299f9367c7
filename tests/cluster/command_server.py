"""Run commands on a node one after the other, as ``docker exec`` does, but in one process.

Started by tests/cluster/shells.py with the text of this file as the program. A request is one line of JSON. The
server replies with ``{}`` when it accepts the request, and with a second line that holds the result. It exits at end
of input.
"""

from __future__ import annotations

import base64
import json
import os
import pwd
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any

GRACE_S = 1.0
"""Time for which output is read after a command has ended, because its background processes may keep it open."""


def main() -> None:
    """Serve requests until end of input."""
    for line in sys.stdin.buffer:
        _say({})
        _say(run(**json.loads(line)))


def run(argv: list[str], user: str, home: str, stdin: str, timeout_s: float) -> dict[str, Any]:
    """Run ``argv`` as ``user`` in ``home``; return its status (None: timed out after ``timeout_s``) and its output."""
    me = pwd.getpwuid(os.geteuid()).pw_name
    identity: dict[str, Any] = {}
    if user != me:
        group = pwd.getpwnam(user).pw_gid
        identity = {"user": user, "group": group, "extra_groups": os.getgrouplist(user, group)}
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=home,
            env={**os.environ, "HOME": home, "USER": user},
            start_new_session=True,
            **identity,
        )
    except OSError as error:
        return _answer(127 if isinstance(error, FileNotFoundError) else 126, b"", f"{argv[0]}: {error}\n".encode())
    printed = bytearray(), bytearray()
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    threads = [
        threading.Thread(target=_feed, args=(process.stdin, stdin.encode()), daemon=True),
        threading.Thread(target=_drain, args=(process.stdout, printed[0]), daemon=True),
        threading.Thread(target=_drain, args=(process.stderr, printed[1]), daemon=True),
    ]
    for thread in threads:
        thread.start()
    in_time = _ends_within(process.pid, timeout_s)
    if not in_time:
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    deadline = time.monotonic() + GRACE_S
    for thread in threads[1:]:
        thread.join(max(0.0, deadline - time.monotonic()))
    status = 128 - status if status < 0 else status  # signals as shells and Docker report them
    return _answer(status if in_time else None, bytes(printed[0]), bytes(printed[1]))


def _ends_within(pid: int, timeout_s: float) -> bool:
    watch = os.pidfd_open(pid)
    try:
        return bool(select.select([watch], [], [], timeout_s)[0])
    finally:
        os.close(watch)


def _feed(stream: IO[bytes], data: bytes) -> None:
    try:
        with stream:
            stream.write(data)
    except BrokenPipeError:
        pass  # the command does not read all of its input


def _drain(stream: IO[bytes], into: bytearray) -> None:
    while chunk := os.read(stream.fileno(), 65536):
        into += chunk
    stream.close()


def _answer(status: int | None, out: bytes, err: bytes) -> dict[str, Any]:
    return {"status": status, "out": base64.b64encode(out).decode(), "err": base64.b64encode(err).decode()}


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
