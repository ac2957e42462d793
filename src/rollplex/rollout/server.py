"""A host in a process of its own: the process (`serve`), and what drives it from here (`ServerHost`).

Both sides send from a thread, so that neither can block the other. While it decodes, the process keeps telling that it
lives. It ends when the connection does, so it never outlives who started it.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rollplex.errors import DeadlineError, EngineError, RollplexError, StateError
from rollplex.rollout.engine import Finished
from rollplex.rollout.hosting import Host, HostDied, HostSettings, Request

_EXIT_WAIT_S = 10.0  # for a process that was told to end, or whose connection is closed
_LOG_TAIL_CHARS = 2000
_SIGN_OF_LIFE_S = 0.5  # a process that decodes tells so at least this often, between two steps


class ServerHost:
    """A host that runs in a child process. The process starts at once; `wait_ready` waits for it."""

    def __init__(self, target: str, settings: HostSettings, name: str, *, log: Path, start_timeout_s: float):
        self.settings, self.log, self.start_timeout_s = settings, log, start_timeout_s
        self.ready = False
        self._finished: list[Finished] = []
        self._results: dict[int, Any] = {}  # answers that nobody has taken yet, by the number of the call
        self._called = self._answered = 0
        parent, child = Pipe()
        self.connection: Connection | None = parent
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with log.open("ab") as output, child:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(child.fileno()), target],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[child.fileno()],
                env=environment,
            )
        self.name = f"{name} (process {self.process.pid})"
        self.last_heard_s = time.monotonic()
        self._reader, self._outbox = parent, _Outbox(parent)
        self._outbox.put((settings, self.name))

    def wait_ready(self) -> None:
        """Wait until the process can be used, at most `start_timeout_s`."""
        self._wait(lambda: self.ready, self.start_timeout_s, "start", "rollout.vllm.start_timeout_s")

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue responses."""
        self.last_heard_s = time.monotonic()
        self._outbox.put(("submit", tuple(requests)))

    def poll(self) -> list[Finished]:
        """Responses that the process told of."""
        while self._reader.poll(0):
            self._receive()
        finished, self._finished = self._finished, []
        return finished

    def call(self, method: str, *args: object) -> Callable[[], Any]:
        """Begin a method; the function returned waits for its answer at most `settings.timeout_s`, and hands it out
        once: StateError after that."""
        self._called += 1
        number = self._called
        self._outbox.put(("call", method, args))

        def wait() -> Any:
            if number <= self._answered and number not in self._results:
                raise StateError(f"the answer of {self.name} to {method} was taken before")
            self._wait(lambda: number in self._results, self.settings.timeout_s, method, "rollout.vllm.call_timeout_s")
            return self._results.pop(number)

        return wait

    def close(self) -> None:
        """End the process and all that it started."""
        if not self.ready:  # it would not read before its start has ended, and has nothing to lose
            self.process.kill()
        self._outbox.close()
        try:
            self.process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_EXIT_WAIT_S)
        self._reader.close()

    def _wait(self, arrived: Callable[[], bool], timeout_s: float, what: str, option: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not arrived():
            if self._reader.poll(max(0.0, deadline_s - time.monotonic())):
                self._receive()
            elif time.monotonic() >= deadline_s:
                raise DeadlineError(
                    f"{self.name} did not end its {what} within {timeout_s:g} s ({option}); its last output: "
                    f"{self._last_output()}"
                )

    def _receive(self) -> None:
        try:
            kind, *content = pickle.loads(self._reader.recv_bytes())
        except (EOFError, OSError):
            raise HostDied(self.name, self._how_it_ended()) from None
        self.last_heard_s = time.monotonic()
        if kind == "finished":
            self._finished += content[0]
        elif kind == "ready":
            self.ready = True
        elif kind == "done":
            self._answered += 1  # in the order of the calls
            self._results[self._answered] = content[0]
        elif kind == "error":
            raise content[0]

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection but still runs"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}; its last output: {self._last_output()}"

    def _last_output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL_CHARS:].strip() or "none"


class _Outbox:
    """Sends messages from a thread of its own, in order. A broken connection is left to the reader to notice."""

    def __init__(self, connection: Connection):
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._connection = connection
        self._thread = threading.Thread(target=self._run, name="rollplex-outbox", daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """Queue a message, as it is now."""
        # Not Connection.send: its pickler would move tensors into shared memory, the sender's own copies with them.
        self._messages.put(pickle.dumps(message))

    def close(self) -> None:
        """Tell the other side that nothing more comes, once all before is sent."""
        self.put(("close",))
        self._messages.put(None)
        self._thread.join(_EXIT_WAIT_S)

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._connection.send_bytes(message)
            except OSError:
                return


def serve(connection: Connection, target: str) -> None:
    """Build the host that `target` ("module:Name") names and obey until the connection closes or something fails."""
    outbox = _Outbox(connection)
    host: Host | None = None
    try:
        settings, name = pickle.loads(connection.recv_bytes())
        module, _, attribute = target.partition(":")
        host = getattr(importlib.import_module(module), attribute)(settings, name)
        assert host is not None
        outbox.put(("ready",))
        _obey(connection, outbox, host)
    except EOFError:  # who started this process is gone
        pass
    except RollplexError as error:
        outbox.put(("error", error))
    except Exception:
        outbox.put(("error", EngineError(f"{target} failed:\n{traceback.format_exc()}")))
    finally:
        outbox.close()
        if host is not None:
            host.close()


def _obey(connection: Connection, outbox: _Outbox, host: Host) -> None:
    unfinished, told_s = 0, time.monotonic()
    while True:
        # All orders first: who sends them never waits for long.
        while connection.poll(0 if unfinished else None):
            kind, *content = pickle.loads(connection.recv_bytes())
            if kind == "close":
                return
            if kind == "submit":
                host.submit(content[0])
                unfinished += sum(len(request.indices) for request in content[0])
            else:
                outbox.put(("done", host.call(content[0], *content[1])()))
        finished = host.poll()
        unfinished -= len(finished)
        if finished or time.monotonic() - told_s > _SIGN_OF_LIFE_S:
            outbox.put(("finished", finished))
            told_s = time.monotonic()


def main(arguments: Sequence[str]) -> None:
    """python -m rollplex.rollout.server FILE_DESCRIPTOR MODULE:NAME"""
    # Ctrl-C reaches the whole terminal group; who started this process decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(_connection(int(arguments[0])), arguments[1])


def _connection(descriptor: int) -> Any:
    return Connection(descriptor)


if __name__ == "__main__":
    main(sys.argv[1:])
