"""Real processes for tests: started together, joined over gloo, ended by a deadline whatever they do."""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from rollplex.parallel.groups import Job, join_job

# Imported once, by the server that all processes are forked from: an import of torch costs seconds.
_PRELOAD = ["torch", "rollplex.models.build", "rollplex.models.prompts", "rollplex.train.update", "datasets"]
_GRACE_S = 60.0  # for messages of the others after the first process failed

Work = Callable[..., Any]
"""work(job, *arguments) -> a value that torch.save can write. A function of a module that can be imported by name."""


def run_ranks(
    work: Work,
    world: int,
    *arguments: Any,
    deadline_s: float = 250.0,
    wait_s: float = 120.0,
    killed: Sequence[int] = (),
) -> list[Any]:
    """What `work` returned on each of `world` processes; None for those in `killed`, which must end by a signal.

    wait_s: the deadline that the processes have for each other. Raises AssertionError with the tracebacks of those that
    failed, or naming those that were still busy at the deadline; no process outlives the call.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(target=_run, args=(pipe[1], work, rank, world, rendezvous, wait_s, arguments))
            for rank, pipe in enumerate(pipes)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            answers = _collect([receiver for receiver, _ in pipes], monotonic() + deadline_s)
        finally:
            for process in processes:
                process.join(timeout=0.5)
                if process.is_alive():
                    process.kill()
                    process.join()
        codes = [process.exitcode for process in processes]
    problems = []
    for rank, answer in enumerate(answers):
        if rank in killed:
            if answer is not None or codes[rank] is None or codes[rank] >= 0:  # type: ignore[operator]
                problems.append(f"rank {rank} should have been killed: exit code {codes[rank]}")
        elif answer is None:
            problems.append(f"rank {rank} gave no answer within {deadline_s} s (exit code {codes[rank]})")
        elif answer[0] == "error":
            problems.append(f"rank {rank}:\n{answer[1]}")
    assert not problems, "\n".join(problems)
    return [None if answer is None else torch.load(io.BytesIO(answer[1]), weights_only=False) for answer in answers]


def _collect(receivers: list[Connection], deadline_s: float) -> list[tuple[str, Any] | None]:
    answers: list[tuple[str, Any] | None] = [None] * len(receivers)
    open_ones = list(range(len(receivers)))
    while open_ones and (left := deadline_s - monotonic()) > 0:
        for ready in wait([receivers[i] for i in open_ones], timeout=left):
            rank = next(i for i in open_ones if receivers[i] is ready)
            open_ones.remove(rank)
            try:
                answers[rank] = receivers[rank].recv()
            except EOFError:  # ended without an answer
                continue
            if answers[rank][0] == "error":  # type: ignore[index]
                deadline_s = min(deadline_s, monotonic() + _GRACE_S)
    return answers


def _run(  # noqa: PLR0913, PLR0917 - multiprocessing passes positionally
    pipe: Connection, work: Work, rank: int, world: int, rendezvous: str, wait_s: float, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        job: Job = join_job(rank, world, rendezvous, device="cpu", deadline_s=wait_s)
        buffer = io.BytesIO()
        torch.save(work(job, *arguments), buffer)
        pipe.send(("value", buffer.getvalue()))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # no teardown of process groups: a peer may be gone already
