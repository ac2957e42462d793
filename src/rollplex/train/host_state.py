"""AdamW's state in host memory: brought to the device for one optimizer step, chunk by chunk.

Two chunks are on the device at a time: while one is updated the next one arrives and the one before leaves (on a GPU
beside the kernels, memory/host_copies.py). The arithmetic is that of the whole step: AdamW works parameter by
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rollplex.memory.host_copies import HostCopies


@dataclass
class _Chunk:
    """Some parameters of the optimizer's groups, and their state once it exists."""

    params: list[list[torch.Tensor]]  # by parameter group
    copies: HostCopies | None = None


class HostState:
    """Moves the state of `adamw`, and those of its parameters that are masters of 16-bit weights."""

    def __init__(self, adamw: torch.optim.AdamW, masters: Sequence[torch.Tensor], chunk_bytes: int):
        """masters: parameters that nothing but the optimizer reads; chunk_bytes: state that moves at a time, a
        parameter's at least."""
        self._adamw, self._masters = adamw, {id(master) for master in masters}
        self._chunks = self._cut(chunk_bytes)
        for chunk in self._chunks:
            self._put_away(chunk)

    @property
    def num_chunks(self) -> int:
        """How many pieces the state moves in."""
        return len(self._chunks)

    def step(self, after: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """One step of all parameters. after: called with the parameters of each chunk once they have moved, while they
        are on the device."""
        chunks = self._chunks
        self._bring_back(chunks[0])
        for before, chunk, following in zip([None, *chunks[:-1]], chunks, [*chunks[1:], None], strict=True):
            if following is not None:
                # Copies and kernels are only queued on a GPU: without this, all chunks would be there before one left.
                if before is not None and before.copies is not None:
                    before.copies.wait_until_away()
                self._bring_back(following)
            if chunk.copies is not None:
                chunk.copies.wait()
            with self._only(chunk):
                self._adamw.step()
            after([param for group in chunk.params for param in group])
            self._put_away(chunk)

    def on_host(self, param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, `param` itself or of its state, as host memory holds it."""
        copies = next(
            chunk.copies for chunk in self._chunks if any(param is p for group in chunk.params for p in group)
        )
        return tensor if copies is None or not copies.has(tensor) else copies.on_host(tensor)

    def in_turn(self) -> Iterator[Sequence[torch.Tensor]]:
        """The parameters of one chunk after another, each on the device with its state, which may be replaced, until
        the next is asked for."""
        for chunk in self._chunks:
            self._bring_back(chunk)
            if chunk.copies is not None:
                chunk.copies.wait()
            try:
                yield [param for group in chunk.params for param in group]
            finally:
                chunk.copies = None
                self._put_away(chunk)

    def _cut(self, chunk_bytes: int) -> list[_Chunk]:
        groups = self._adamw.param_groups
        chunks, size = [_Chunk([[] for _ in groups])], 0
        for number, group in enumerate(groups):
            for param in group["params"]:
                nbytes = param.nbytes * (3 if id(param) in self._masters else 2)
                if size and size + nbytes > chunk_bytes:
                    chunks.append(_Chunk([[] for _ in groups]))
                    size = 0
                chunks[-1].params[number].append(param)
                size += nbytes
        return chunks

    @contextmanager
    def _only(self, chunk: _Chunk) -> Iterator[None]:
        """AdamW moves this chunk's parameters and no others."""
        groups = self._adamw.param_groups
        everything = [group["params"] for group in groups]
        for group, params in zip(groups, chunk.params, strict=True):
            group["params"] = params
        try:
            yield
        finally:
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params

    def _bring_back(self, chunk: _Chunk) -> None:
        if chunk.copies is not None:
            chunk.copies.bring_back()

    def _put_away(self, chunk: _Chunk) -> None:
        """What is there: nothing of a parameter that has not had a gradient yet, but for its master."""
        held = []
        for param in (param for group in chunk.params for param in group):
            held += [param] if id(param) in self._masters else []
            held += [value for value in self._adamw.state.get(param, {}).values() if value.ndim]  # not the step count
        known = chunk.copies
        if known is None or not known.holds(held):
            chunk.copies = known = HostCopies("optimizer state", held)
        known.put_away()
