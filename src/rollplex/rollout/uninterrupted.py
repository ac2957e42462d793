"""Functions of tensors that a CPU runs without the interpreter.

Between two operations torch gives Python's lock back, and where two threads meet at it one sleeps for 35 to 50 us,
longer than most operations of a decode step take (docs/lab-notes.md). Passes run beside decoding, so a step that is one
call from its tokens to its logits meets them a few times, not some hundred. TorchScript makes it one: the same
operations in the same order, so the same bits, without a compiler and for all shapes. The first calls of a process take
a tenth of a second longer.

torch calls TorchScript deprecated, and Python 3.14 is without it: what it is to be replaced by compiles anew for each
number of rows, and rounds otherwise. Where it is gone the functions run as the Python that they are.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")
_LOCK = threading.Lock()  # of compilation, and of the process's filters of warnings meanwhile


def uninterrupted(function: Callable[Given, Result], device: torch.device) -> Callable[Given, Result]:
    """`function` as it is called for tensors of `device`: as it is on others than a CPU, where it may be recorded
    (capture.py) and TorchScript would fuse kernels. Thread-safe."""
    if device.type != "cpu" or sys.version_info >= (3, 14):
        return function
    with _LOCK:
        return _scripted(function)


def held(*values: object) -> object:
    """All tensors in these lists and tuples once more, for as long as what this returns is kept.

    Where C++ lets go of a tensor that only Python holds otherwise, torch takes the interpreter, so a call without it
    would ask for it at each weight. This is a list that C++ holds.
    """
    tensors = list(_tensors(values))
    is_called_without = sys.version_info < (3, 14) and all(tensor.device.type == "cpu" for tensor in tensors)
    return torch.ScriptList(tensors) if tensors and is_called_without else None


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


@cache
def _scripted(function: Callable[Given, Result]) -> Callable[Given, Result]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.script` is deprecated")
        scripted: Callable[Given, Result] = torch.jit.script(function)
    return scripted
