"""A host of tests/local_host.py that takes from training's storage what its engine, which fuses q, k, v itself, can."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from local_host import LocalHost
from rollplex.errors import EngineError
from rollplex.models.save import stored_state
from rollplex.rollout.hosting import HostSettings, WeightBucket
from rollplex.weights.layout import Store
from rollplex.weights.lending import EngineLayer, EngineSharing, EngineTensor, Verdict, Way, decide
from rollplex.weights.loan import Loan
from rollplex.weights.share import Backing


class SharingHost(LocalHost):
    """Further files that are orders: `refuse-load` makes the next load fail, `hang-in-load` makes it wait for ever, and
    while `hold-load` is there no load ends."""

    def __init__(self, settings: HostSettings, name: str = "sharing"):
        super().__init__(settings, name)
        self.backing: Backing | None = None
        self.pushed = set(stored_state(self.policy.model))

    def call(self, method: str, *args: object) -> Callable[[], Any]:
        """At once."""
        result = getattr(self, method)(*args)
        return lambda: result

    def begin_load(self) -> None:
        """What is pushed is no longer valid."""
        with suppress(FileNotFoundError):
            (self.folder / "hang-in-load").unlink()
            time.sleep(3600)
        own = stored_state(self.policy.model)
        with torch.no_grad():
            for name in self.pushed:
                own[name].fill_(float("nan"))
        self.loads = 0

    def load(self, bucket: WeightBucket) -> None:
        """Copy in place what is pushed."""
        with suppress(FileNotFoundError):
            (self.folder / "refuse-load").unlink()
            raise EngineError(f"process {os.getpid()} refuses the load")
        super().load(bucket)

    def end_load(self) -> None:
        """Older prefixes are stale."""
        while (self.folder / "hold-load").exists():
            time.sleep(0.01)
        super().end_load()

    def share(self, loan: Loan) -> EngineSharing:
        """Put each parameter that is a tensor of its own on training's storage."""
        self.backing = loan.backing()
        memory = self.backing.stores[Store.BACKING]
        verdicts: list[Verdict] = []
        for name, parameter in self.policy.model.named_parameters():
            dtype = str(parameter.dtype).removeprefix("torch.")
            tensor = EngineTensor(name, (name,), dtype, tuple(parameter.shape), parameter.stride())
            verdict = decide(EngineLayer(name, "cpu", (tensor,)), loan.terms, rank=0, degree=1)
            for _, view in verdict.views:
                place = memory.as_strided(view.shape, view.strides, view.offset)
                assert torch.equal(place, parameter)
                parameter.data = place
            verdicts.append(verdict)
        self.pushed = {v.layer.name for v in verdicts if v.way is Way.PUSHED}
        return EngineSharing((tuple(verdicts),))
