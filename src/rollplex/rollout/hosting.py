"""What a rollout engine with weights of its own is asked, in this process or in another: the messages and the protocol.

A host samples single responses: a prompt's responses are separate requests, each with its own seed, so that nothing but
(run seed, rollout id, response index) decides their random numbers, whichever host samples them and whatever else it
samples at the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from rollplex.errors import PeerError
from rollplex.rollout.engine import Finished, SamplingParams
from rollplex.types import PromptSpec


@dataclass(frozen=True, slots=True)
class HostSettings:
    """How each host is built. Bytes and rows are those of one host."""

    model_folder: str  # config, tokenizer and processor; weights are pushed, not read
    dtype: str
    tensor_parallel: int
    max_model_len: int | None  # None: the model's own
    max_rows: int
    kv_cache_bytes: int
    enforce_eager: bool
    temperature: float  # of all sampling and of all log-probs
    sleep: bool
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Request:
    """Some responses to one prompt."""

    rollout_id: int
    spec: PromptSpec
    params: SamplingParams
    indices: tuple[int, ...]


class WeightBucket(Protocol):
    """Some of the weights, under transformers' names."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs. The tensors keep their values until the whole load has ended."""


class HostDied(PeerError):
    """A host's process, or one of its workers, ended, and what it was sampling is lost. Can be pickled."""

    def __init__(self, host_name: str, how: str):
        super().__init__(f"{host_name} {how}")
        self.host_name, self.how = host_name, how

    def __reduce__(self) -> tuple[type[HostDied], tuple[str, str]]:
        return HostDied, (self.host_name, self.how)


class Host(Protocol):
    """One engine. Only `submit` and `poll` may be called while responses are unfinished."""

    name: str
    connection: Connection | None  # readable when `poll` has news; None: `poll` itself decodes
    last_heard_s: float  # monotonic time of the last sign of life

    def wait_ready(self) -> None:
        """Wait for the end of the start. Raises DeadlineError, HostDied, or what the start raised."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue responses."""

    def poll(self) -> list[Finished]:
        """Responses that ended since. In this process: one decoding step. Of another: what it told, without waiting.

        Raises HostDied, and what the host raised.
        """

    def call(self, method: str, *args: object) -> Callable[[], Any]:
        """Begin one of the methods below; the function that is returned waits for its end, and returns its result.

        begin_load(), load(bucket), end_load(): replace all weights, bucket by bucket, then drop every cache that
        depends on them. share(loan) -> EngineSharing, after a load: take from training's storage what can be taken;
        later loads bring the rest alone, which may be nothing. sleep(), wake_weights(), wake_kv(): give device memory
        back, and take it again.
        """

    def close(self) -> None:
        """Free everything. Never raises."""
