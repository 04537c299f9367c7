"""A node with emulated GPUs, and programs that run on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waiting import DEADLINE_S, wait_until


class DriverError(Exception):
    """An error of NVIDIA's library in a program, by name."""


@dataclass
class Program:
    """A running `session.py`."""

    process: subprocess.Popen[str]
    pid: int

    def send(self, code: str) -> None:
        """Send code without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """Return the answer to the code sent before."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the program ended with {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise DriverError(f"{answer['error']}: {answer['message']}" if "message" in answer else answer["error"])
        return answer["result"]

    def do(self, code: str) -> Any:
        """Execute statements; return the value of `result` if they set it."""
        self.send(code)
        return self.receive()

    def get(self, expression: str) -> Any:
        """Return the value of an expression."""
        return self.do(f"result = {expression}")

    def until(self, expression: str, good: Callable[[Any], bool]) -> Any:
        """Poll until the expression has this value; return it."""
        return wait_until(f"{expression} is as wanted", lambda: self.get(expression), good)

    def kill(self) -> None:
        """Kill the program without a chance to clean up."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Kill the program and close its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@dataclass
class Node:
    """A node with emulated GPUs."""

    build: Path
    directory: Path
    programs: list[Program] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """Return the environment in which programs use the node's GPUs."""
        kept = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        return {**kept, "LD_LIBRARY_PATH": str(self.build), "GPU_EMULATOR_STATE": str(self.directory / "state")}

    def ctl(self, *arguments: str) -> str:
        """Run gpu-emulatorctl; return its output."""
        tool = [str(self.build / "gpu-emulatorctl"), *arguments]
        return subprocess.run(tool, env=self.env, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout

    def init(self, *arguments: str) -> None:
        """Set the node up, by default with two small GPUs."""
        self.ctl(
            "init", "--seed", "test", *(arguments or ("--gpus", "2", "--memory-mib", "4096", "--context-mib", "100"))
        )

    def show(self) -> dict[str, Any]:
        """Return the output of `gpu-emulatorctl show --json`."""
        shown: dict[str, Any] = json.loads(self.ctl("show", "--json"))
        return shown

    def start(self, *before: str, **environment: str) -> Program:
        """Start a program; `before` is a command to run it under."""
        process = subprocess.Popen(
            [*before, sys.executable, str(Path(__file__).with_name("session.py"))],
            env={**self.env, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        program = Program(process, process.pid)
        self.programs.append(program)
        return program

    def user(self, ordinal: int = 0) -> Program:
        """Start a program with a context on a GPU."""
        program = self.start()
        program.do(f"use({ordinal})")
        return program

    def agent(self) -> Program:
        """Start a program that monitors through NVML and has no context."""
        program = self.start()
        program.do("n.nvmlInit()")
        return program
