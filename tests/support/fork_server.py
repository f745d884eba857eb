"""Starts Python processes that have torch and the training loop already imported, by forking one prepared process.

A fresh process needs two to four CPU seconds to import torch, and a test with two ranks starts two of them. The client
(`start`) runs in the test process. The server is this file as a script: it imports `ranks`, then waits for requests and
forks one child for each. Its only other thread is that of pyarrow's allocator, which handles forks itself, so a fork is
safe. A child starts without any process group of torch.distributed. Variables that are read when a process starts, such
as LD_PRELOAD, need a server of their own.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

READ_AT_START = ("LD_PRELOAD",)  # variables that only take effect in a new process


class _Server:
    """The connection to one prepared process."""

    def __init__(self, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        self._stream = ours.makefile("rw", encoding="utf-8")
        ours.close()
        atexit.register(self.close)

    def ask(self, **request: Any) -> Any:
        """The server's answer to one request."""
        self._stream.write(json.dumps(request) + "\n")
        self._stream.flush()
        answer = self._stream.readline()
        assert answer, f"the server of forked processes ended with code {self._process.wait()}"
        return json.loads(answer)

    def close(self) -> None:
        self._stream.close()
        self._process.wait()


_servers: dict[tuple[str, ...], _Server] = {}


@dataclass
class ForkedProcess:
    """A child of the server, with the parts of `subprocess.Popen` that tests of ranks use."""

    pid: int
    returncode: int | None = None
    _server: _Server = field(kw_only=True, repr=False)
    _output: Path = field(kw_only=True, repr=False)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            self.returncode = self._server.ask(wait=self.pid)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end. Returns (stdout, stderr); raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return tuple((self._output / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))

    def kill(self) -> None:
        """End the process if it still runs, and remove what it wrote to its streams."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            while self.poll() is None:
                time.sleep(0.02)
        shutil.rmtree(self._output, ignore_errors=True)


def start(code: str, arguments: list[str], environment: dict[str, str]) -> ForkedProcess:
    """Run `code` as `__main__` in a fork of the prepared process, with `arguments` in sys.argv[1:]."""
    key = tuple(environment.get(name, "") for name in READ_AT_START)
    if key not in _servers:
        _servers[key] = _Server(environment)
    output = Path(tempfile.mkdtemp())
    pid = _servers[key].ask(code=code, arguments=arguments, environment=environment, output=str(output))
    return ForkedProcess(pid, _server=_servers[key], _output=output)


def serve(descriptor: int) -> None:
    """Answer requests until the test process closes the connection. Only a child returns before that."""
    import ranks  # noqa: F401  torch and the training loop

    threads = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    assert len(threads - {"jemalloc_bg_thd"}) == 1, f"a process with several threads cannot be forked safely: {threads}"
    connection = socket.socket(fileno=descriptor)
    stream = connection.makefile("rw", encoding="utf-8")
    for line in stream:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                connection.close()
                _run(request)
        stream.write(json.dumps(answer) + "\n")
        stream.flush()


def _run(request: dict[str, Any]) -> NoReturn:
    """Become the process that was asked for, and end as the interpreter ends."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        target = os.open(Path(request["output"]) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(target, number)
        os.close(target)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["-c", *request["arguments"]]
    main = ModuleType("__main__")  # without a file, so that loader processes do not import this script
    sys.modules["__main__"] = main
    exec(compile(request["code"], "<string>", "exec"), main.__dict__)
    sys.exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
