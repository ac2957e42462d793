"""Lanes of one device: how much of it each kind of work gets. With memory/host_copies.py (copies) and
rollout/capture.py (graphs) all there is of torch.cuda.

CPU: a budget of threads per lane; torch keeps the number of threads of each calling thread apart. CUDA: streams,
decoding at high and window passes at low priority. A priority decides who is next, not who must stop: a kernel of the
window keeps the multiprocessors that it has. In a green context it has only some. (A backward runs on the streams of
its forward: learner.py sees that no graph crosses lanes then.) A block ends when its work has ended on the device, so
that "done" means done for every lane and no memory is handed over that a kernel still reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from rollplex.errors import ConfigError

if TYPE_CHECKING:
    from torch.cuda.green_contexts import GreenContext


class DeviceLanes(Protocol):
    """Blocks in which a lane's work runs, each in the thread that enters it."""

    @property
    def can_overlap(self) -> bool:
        """Whether the window lane has anything of its own to run on."""

    def main(self) -> AbstractContextManager[None]:
        """The device to itself."""

    def decode(self, *, beside_window: bool) -> AbstractContextManager[None]:
        """Decoding, alone or while a pass runs in the window."""

    def window(self) -> AbstractContextManager[None]:
        """Passes beside decoding."""


@dataclass(frozen=True, slots=True)
class CpuLanes:
    """Threads of each lane, of the `main_threads` that the run has."""

    main_threads: int
    decode_threads: int  # alone
    beside_threads: int  # of decoding while a pass runs in the window
    window_threads: int

    @property
    def can_overlap(self) -> bool:
        """Whether decoding leaves a thread idle."""
        return self.window_threads > 0

    def main(self) -> AbstractContextManager[None]:
        """All threads."""
        return _threads(self.main_threads)

    def decode(self, *, beside_window: bool) -> AbstractContextManager[None]:
        """Threads of decoding."""
        return _threads(self.beside_threads if beside_window else self.decode_threads)

    def window(self) -> AbstractContextManager[None]:
        """Threads of the window."""
        return _threads(self.window_threads)


@contextmanager
def kept_threads() -> Iterator[None]:
    """A block after which the calling thread has its CPU threads back, whichever lane it was in when it ended."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    if torch.get_num_threads() != count:
        torch.set_num_threads(
            count
        )  # of the calling thread; left so: the next block sets its own, `kept_threads` the last
    yield


class CudaLanes:
    """Streams of one GPU: decoding before the window where both have kernels waiting."""

    def __init__(self, device: torch.device, *, window_sms: int | None = None):
        """window_sms: multiprocessors that the window may use; None: all. Raises ConfigError."""
        self.device = device
        self._decode = torch.cuda.Stream(device, priority=-1)  # torch: -1 is high, 0 is low
        self._green = None if window_sms is None else green_context(device, window_sms)  # ends with its last reference
        self._window = self._green.Stream() if self._green is not None else torch.cuda.Stream(device, priority=0)

    @property
    def can_overlap(self) -> bool:
        """A stream of its own is always there."""
        return True

    def main(self) -> AbstractContextManager[None]:
        """The default stream."""
        return self._on(torch.cuda.default_stream(self.device))

    def decode(self, *, beside_window: bool) -> AbstractContextManager[None]:
        """The stream of high priority."""
        return self._on(self._decode)

    def window(self) -> AbstractContextManager[None]:
        """The stream of low priority, or that of the green context."""
        return self._on(self._window)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()


def green_context(device: torch.device, sms: int) -> GreenContext:
    """Part of a GPU: so many multiprocessors, rounded up to what the driver divides by. Raises ConfigError where this
    torch, driver or device has no such part."""
    try:
        from torch.cuda.green_contexts import GreenContext  # noqa: PLC0415 - the oldest torch that is supported has none

        if not hasattr(GreenContext, "Stream"):
            raise ImportError("its green contexts have no streams")
    except ImportError as error:
        raise ConfigError(
            f"schedule.window_sms needs a torch with green contexts, such as 2.14; found {torch.__version__}: {error}; "
            "install another, or leave the option out"
        ) from error
    try:
        there = torch.cuda.get_device_properties(device).multi_processor_count
        if sms >= there:
            raise ConfigError(
                f"schedule.window_sms is {sms}, but this GPU has {there} multiprocessors and decoding needs some of "
                f"its own; choose 1 to {there - 1}"
            )
        number = torch.cuda.current_device() if device.index is None else device.index
        return GreenContext.create(num_sms=sms, device_id=number)
    except (RuntimeError, AssertionError) as error:  # torch raises both for what is missing
        raise ConfigError(
            f"schedule.window_sms={sms} cannot be had: {error}; install what is missing, or leave the option out"
        ) from error


def device_of(choice: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device that run.device names. Raises ConfigError for a GPU that torch does not see."""
    if choice == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if choice == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "run.device is cuda, but torch sees no GPU (torch.cuda.is_available() is False): install a CUDA build of "
            "torch and its driver, or set run.device=cpu"
        )
    return torch.device(choice)


def take_device(kind: str, local_rank: int) -> None:
    """Make the GPU of this number the one that "cuda" means here; nothing to do on a CPU. Raises ConfigError when this
    host has fewer."""
    if kind != "cuda":
        return
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"process {local_rank} of this host has no GPU of its own: torch sees {torch.cuda.device_count()}; start "
            "as many processes as there are GPUs (torchrun --nproc-per-node), or set run.device=cpu"
        )
    torch.cuda.set_device(local_rank)


def device_name(device: torch.device) -> str:
    """What to call the hardware in a result."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def allocated_bytes(device: torch.device) -> int | None:
    """Bytes that torch has allocated on a GPU now; None on a CPU, which does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    """Begin to look for the peak of allocated memory anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes that torch has had allocated on a GPU since `reset_peak`; None on a CPU, which does not count them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def device_lanes(
    device: torch.device, *, decode_threads: int | None, window_threads: int | None, window_sms: int | None
) -> DeviceLanes:
    """Lanes of `device`. On a CPU with T threads (torch.get_num_threads) and nothing else said, decoding has all of
    them alone and shares them with the window in halves; with one thread there is no window."""
    if device.type == "cuda":
        if decode_threads is not None or window_threads is not None:
            raise ConfigError(
                "schedule.decode_threads and schedule.window_threads do nothing on a GPU, whose lanes are streams; "
                "leave them out, or use schedule.window_sms"
            )
        return CudaLanes(device, window_sms=window_sms)
    if window_sms is not None:
        raise ConfigError(
            "schedule.window_sms does nothing on a CPU, whose lanes are threads; leave it out, or use "
            "schedule.window_threads"
        )
    total = torch.get_num_threads()
    least = max(decode_threads or 1, 1)  # decoding needs one whatever was said
    if least + (window_threads or 0) > total:
        raise ConfigError(
            f"decoding with {least} threads (schedule.decode_threads) and passes beside it with {window_threads or 0} "
            f"(schedule.window_threads) are together more than the {total} threads of this run; lower them, or raise "
            "run.num_threads"
        )
    if window_threads is None:
        window_threads = total // 2 if decode_threads is None else max(0, total - decode_threads)
    beside = max(1, total - window_threads) if decode_threads is None else decode_threads
    return CpuLanes(total, decode_threads or total, beside, window_threads)
