"""Bits of products that do not depend on the number of threads, asked of MKL where it can promise them.

How many threads compute a product depends on what runs beside decoding, and results must not. On an Intel processor
MKL's fp32 products depend on it in many shapes (16 rows and more of 1,408 numbers, 4 to 15 of 448), but not in its
strict mode of conditional numerical reproducibility, which costs nothing measurable (docs/lab-notes.md). Other
processors have no such mode; what models/steady.py adds is for them.
"""

from __future__ import annotations

import os
import platform
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE, STRICT = "MKL_CBWR", "AUTO,STRICT"
_INTEL, _FIRST_BYTES = "GenuineIntel", 4096


def ask_for_steady_bits(environment: MutableMapping[str, str], *, intel: bool) -> None:
    """Before MKL's first product, which reads it. What a user has set stays."""
    if intel:
        environment.setdefault(VARIABLE, STRICT)


def is_intel() -> bool:
    """Whether this machine's processor is Intel's."""
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            described = file.read(_FIRST_BYTES).decode(errors="replace")  # the rest is the same of every core
    except OSError:  # not Linux
        described = platform.processor()
    return _INTEL in described


ask_for_steady_bits(os.environ, intel=is_intel())
