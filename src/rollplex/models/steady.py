"""Rows of a product whose bits do not depend on how many threads compute it.

MKL's float32 products of 5 to 7 and 9 to 11 rows have other last bits on 2, 6 and 8 threads than on one, for all sizes
that were tried (64 to 2048), alone among 1 to 69 rows; batches of more than one product have not. Decoding comes down
to so few rows in every rollout, on one thread or more as passes run beside it, and the last layer of a prompt pass has
one row a prompt, on the threads of the lane that it runs in. So rows are added up to the next multiple of 4.

Not covered: on 12 threads and more further numbers differ (17 to 19, 25 to 27; on 64 up to 147), no multiple of 4 among
them. All this on AMD processors; on Intel's, where other shapes differ, MKL itself is asked (rollplex/mkl.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F


def missing_rows(rows: int, like: torch.Tensor) -> int:
    """How many rows to add to `rows` of a product with a matrix like `like`."""
    is_few = 4 < rows < 12  # multiples of 4 among them lack none
    return -rows % 4 if is_few and like.dtype == torch.float32 and like.device.type == "cpu" else 0


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right, (..., M, K) and (..., K, N) of the same batch."""
    missing = _missing_rows_of(left)
    if not missing:
        return torch.matmul(left, right)
    return torch.matmul(F.pad(left, (0, 0, 0, missing)), right)[..., : left.shape[-2], :]


def product_into(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """out = left @ right, (N, M, K) and (N, K, L)."""
    if _missing_rows_of(left):
        out.copy_(product(left, right))
    else:
        torch.bmm(left, right, out=out)


def _missing_rows_of(left: torch.Tensor) -> int:
    """Of a product's left side (..., M, K); batches of more than one product need none."""
    batch = 1
    for size in left.shape[:-2]:
        batch *= size
    return missing_rows(left.shape[-2], left) if batch == 1 else 0


def by_rows(module: Callable[[torch.Tensor], torch.Tensor], x_TC: torch.Tensor) -> torch.Tensor:
    """module(x_TC), of a module that takes each row by itself."""
    missing = missing_rows(x_TC.shape[0], x_TC)
    return module(F.pad(x_TC, (0, 0, 0, missing)))[: x_TC.shape[0]] if missing else module(x_TC)
