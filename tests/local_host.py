"""A host whose engine is the local one on a copy of the model: all of rollout.server and rollout.hosted_engine without
vLLM, in processes that can really be killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from rollplex.config import ModelConfig
from rollplex.models.load import load_model
from rollplex.models.policy import Policy
from rollplex.models.save import stored_state
from rollplex.rollout.engine import Finished
from rollplex.rollout.hosting import HostDied, HostSettings, Request, WeightBucket
from rollplex.rollout.local_engine import LocalEngine


class LocalHost:
    """Loads `model_folder`. A file there is an order for one process, which removes it: `die-in-load` ends it at the
    second bucket, `lose-a-worker` makes it tell while it samples that a process of its own has ended, `stop` makes it
    stand still after its first step of sampling."""

    def __init__(self, settings: HostSettings, name: str = "local"):
        self.name, self.connection, self.last_heard_s = name, None, 0.0
        torch.set_num_threads(1)
        self.folder, self.max_rows = Path(settings.model_folder), settings.max_rows
        self.policy = Policy(load_model(ModelConfig(path=settings.model_folder)).model)
        self.engines: list[LocalEngine] = []
        self.loads = 0

    connection: Connection | None

    def wait_ready(self) -> None:
        """It is."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Each request's responses alone, in an engine that samples them all and leaves the others out."""
        for request in requests:
            engine = LocalEngine(self.policy, replace(request.params), max_rows=self.max_rows)
            engine.admit(request.rollout_id, request.spec)
            engine.waiting = type(engine.waiting)(row for row in engine.waiting if row.index in request.indices)
            self.engines.append(engine)

    def poll(self) -> list[Finished]:
        """One step of each engine."""
        with suppress(FileNotFoundError):
            (self.folder / "lose-a-worker").unlink()
            raise HostDied(self.name, "lost worker processes: one of the test")
        finished = [item for engine in self.engines for item in engine.step()]
        self.engines = [engine for engine in self.engines if engine.busy]
        with suppress(FileNotFoundError):
            (self.folder / "stop").unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        return finished

    def call(self, method: str, *args: object) -> Callable[[], None]:
        """At once."""
        getattr(self, method)(*args)
        return lambda: None

    def begin_load(self) -> None:
        """What is there is no longer valid."""
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                parameter.fill_(float("nan"))
        self.loads = 0

    def load(self, bucket: WeightBucket) -> None:
        """Copy in place."""
        self.loads += 1
        if self.loads == 2:
            # Several processes load at once: whoever removes the file is the one that it means.
            with suppress(FileNotFoundError):
                (self.folder / "die-in-load").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        own = stored_state(self.policy.model)
        for name, tensor in bucket.tensors():
            own[name].copy_(tensor)

    def end_load(self) -> None:
        """Older prefixes are stale."""
        self.policy.bump()

    def sleep(self) -> None:
        """Nothing is given back."""

    def wake_weights(self) -> None:
        """Nothing was given back."""

    def wake_kv(self) -> None:
        """Nothing was given back."""

    def close(self) -> None:
        """Nothing is held."""


class NeverReady:
    """A host whose start does not end."""

    def __init__(self, settings: HostSettings, name: str):
        time.sleep(3600)
