"""Dumps and restores real process trees with the package, in a compute container, controlled by lines of JSON.

``drive.py`` reads lines, ``{"do": NAME, "with": [...]}``, and answers each with ``{"result": ...}`` or ``{"error":
KIND, "text": ...}``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from session import HERE, JOB, PYTHON, UID, Session, members, wait_for


class Driven(Session):
    """A session that injects faults."""

    def tamper(self, what: str) -> None:
        """Damage the image."""
        criu = self.store.path / JOB.name / "0001" / "criu"
        pages = next(criu.glob("pages-*.img"))
        if what == "bit":
            data = bytearray(pages.read_bytes())
            data[len(data) // 2] ^= 1
            pages.write_bytes(data)
        elif what == "truncate":
            os.truncate(pages, pages.stat().st_size - 4096)
        elif what == "symlink":
            pages.rename("/var/lib/slurm-affinode/elsewhere")
            pages.symlink_to("/var/lib/slurm-affinode/elsewhere")
        else:
            (criu / "pstree.img").write_bytes(b"no tree")

    def link_file(self) -> str:
        """As the user, replace a file to which the tree appends with a link to a file of root; return that file."""
        path, file_of_root = self.work / "append", Path("/run/checkpoint-test-theirs")
        file_of_root.write_text("root's\n")
        file_of_root.chmod(path.stat().st_mode & 0o7777)
        path.unlink()
        path.symlink_to(file_of_root)
        return str(file_of_root)

    def change_file(self) -> None:
        """Put another file in the place of one that the tree has open."""
        path, other = self.work / "read", self.work / "other"
        other.write_text("another user\n")
        shutil.copymode(path, other)
        other.rename(path)

    def local_files(self, what: str) -> list[int]:
        """Remove or change the workload's node-local files; return the owners of the files left."""
        memory, directory = Path(f"/dev/shm/workload-{UID}"), Path(f"/tmp/workload-{UID}")  # noqa: S108
        self.end()
        if what == "remove":
            memory.unlink()
            memory.with_name(f"sem.{memory.name}").unlink()
            shutil.rmtree(directory)
        elif what == "change":
            with memory.open("r+b") as file:
                file.write(b"another job")
        return sorted({path.stat().st_uid for path in (memory, directory, directory / "deep") if path.exists()})

    def discard(self) -> None:
        """Delete the files of the first suspension."""
        self.store.discard(JOB, 1)

    def dump_and_die(self) -> bool:
        """Start a dump in another agent and kill it meanwhile; return whether the image is still being written."""
        pids = members(self.init)
        root = min(pids)
        # The dump lasts long enough to be interrupted, because it writes the memory of the tree.
        script = (
            "import sys; sys.path.insert(0, sys.argv[1]); import session as d; from pathlib import Path\n"
            "store = d.DirectoryStore(Path(sys.argv[2]), d.KEY)\n"
            "writer = store.begin(d.JOB, uid=d.UID, estimate=0)\n"
            "print('begun', flush=True)\n"
            f"init, owner = d.Process({self.init}).id, d.User(d.UID, d.UID, {self.owner.groups})\n"
            "stop = d.StoppedJob(d.LinuxProcesses(), init)\n"
            "stop.stop(timeout_s=d.DEADLINE_S)\n"
            f"tree = d.Tree(init, {pids[root]}, {root}, owner)\n"
            "d.Criu().dump(tree, writer.criu_fd, timeout_s=60, stop=stop)\n"
        )
        agent = subprocess.Popen(
            [PYTHON, "-c", script, str(HERE), str(self.store.path)], stdout=subprocess.PIPE, start_new_session=True
        )
        assert agent.stdout is not None
        agent.stdout.readline()
        criu = self.store.path / JOB.name / "0001.tmp" / "criu"
        wait_for("CRIU", (criu / "dump.log").exists)
        agent.kill()
        agent.wait()
        return self.busy()

    def provoke(self, what: str) -> list[dict[str, str]] | None:
        """Run a program that cannot be dumped in the namespace; return the refusals of a suspension meanwhile."""
        root = min(members(self.init).items())[1]
        inside = ["nsenter", f"--target={self.init}", "--pid", "--mount", "--"]
        as_alice = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        sleep = [PYTHON, "-c", "import time; print('on', flush=True); time.sleep(1000)"]
        uring = (
            "import ctypes, os, time\n"
            "fd = ctypes.CDLL(None).syscall(425, 4, ctypes.create_string_buffer(120))\n"
            "print('on' if fd >= 0 else 'off', flush=True); time.sleep(1000)"
        )
        trace = (
            f"import ctypes, time; r = ctypes.CDLL(None).ptrace(0x4206, {root}, 0, 0)\n"
            "print('on' if r == 0 else 'off', flush=True); time.sleep(1000)"
        )
        command = {
            "daemon": [*inside, *as_alice, *sleep],
            "root": [*inside, *sleep],
            "namespace": [*inside, "unshare", "--uts", *sleep],
            "uring": [*inside, *as_alice, PYTHON, "-c", uring],
            "tracer": [PYTHON, "-c", trace],
        }[what]
        before = set(members(self.init).values())
        made = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            assert made.stdout is not None
            if made.stdout.readline().strip() != "on":
                return None
            return self.refusals(adopt=what in ("root", "namespace", "uring"))
        finally:
            os.killpg(made.pid, signal.SIGKILL)
            made.wait()
            # A process that nsenter has started is not our child; another process reaps it
            # later.
            wait_for("the end of it", lambda: set(members(self.init).values()) <= before)

    def fault(self, *words: str) -> None:
        """Inject a fault into the emulated driver."""
        subprocess.run(["gpu-emulatorctl", "fault", *words], check=True)


def serve(kind: type[Driven]) -> None:
    """Execute the commands from standard input."""
    session = kind(keep="--keep" in sys.argv)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"result": getattr(session, request["do"])(*request.get("with", ()))}
            except Exception as error:
                answer = {"error": type(error).__name__, "text": str(error)}
            print(json.dumps(answer), flush=True)
    finally:
        session.end()
        session.cuda.close()


if __name__ == "__main__":
    serve(Driven)
