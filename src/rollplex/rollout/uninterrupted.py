"""Functions of tensors that a CPU runs without the interpreter.

Between two operations torch gives Python's lock back, and where two threads meet at it one sleeps for 35 to 50 us,
longer than most operations of a decode step take (docs/lab-notes.md). Passes run beside decoding, so a step that is one
call from its tokens to its logits meets them once, not a few hundred times. TorchScript makes it one: the same
operations in the same order, so the same bits, without a compiler and for all shapes.

torch calls TorchScript deprecated, and Python 3.14 is without it: what stands for it calls for compilation anew for
each number of rows. Where it is gone the functions run as the Python that they are.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


def uninterrupted(function: Callable[Given, Result], device: torch.device) -> Callable[Given, Result]:
    """`function` as it is called for tensors of `device`: other devices wait for nothing between two launches, and
    their steps may be recorded (capture.py)."""
    return _scripted(function) if device.type == "cpu" and sys.version_info < (3, 14) else function


@cache
def _scripted(function: Callable[Given, Result]) -> Callable[Given, Result]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that it is deprecated
        scripted: Callable[Given, Result] = torch.jit.script(function)
    return scripted
