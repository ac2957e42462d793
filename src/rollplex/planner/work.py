"""What a pass does to a device: operations, bytes and launches, before any hardware or time comes in."""

from __future__ import annotations

from dataclasses import dataclass, fields

# A fused attention backward computes the scores again: five products where the forward has two.
ATTENTION_BACKWARD = 2.5
# Gradients are summed in fp32: read and written once per backward.
_GRADIENT_BYTES = 2 * 4


@dataclass(frozen=True, slots=True)
class Work:
    """Operations and bytes of a pass on one device that does all of it. Adds and scales field by field.

    A multiplication and an addition are two operations. Elementwise operations are counted as bytes only.
    Example: Work(matmul_flops=2e9, weight_bytes=1e6) + Work(kernels=4)
    """

    matmul_flops: float = 0.0  # products with weights
    attention_flops: float = 0.0  # scores, and their products with values; a causal pair that is masked counts nothing
    weight_bytes: float = 0.0  # parameters read, gradients read and written: the same for one token as for thousands
    stream_bytes: float = 0.0  # activations through elementwise kernels: grows with the tokens
    kv_bytes: float = 0.0  # keys and values read from a cache
    kernels: float = 0.0  # launches one after another: the depth of the pass

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)))

    def __mul__(self, factor: float) -> Work:
        return Work(*(getattr(self, f.name) * factor for f in fields(Work)))

    __rmul__ = __mul__

    @property
    def flops(self) -> float:
        """All operations."""
        return self.matmul_flops + self.attention_flops

    def backward(self, dtype_bytes: int, *, launches: float = 2.0) -> Work:
        """The backward of this forward, gradients of inputs and of weights: two products for each of the forward's.

        Weights are read once more and their fp32 gradients added to; activations and their gradients both move.
        launches: kernels for each of the forward.
        """
        return Work(
            matmul_flops=2 * self.matmul_flops,
            attention_flops=ATTENTION_BACKWARD * self.attention_flops,
            weight_bytes=self.weight_bytes * (1 + _GRADIENT_BYTES / dtype_bytes),
            stream_bytes=2 * self.stream_bytes,
            kv_bytes=2 * self.kv_bytes,
            kernels=launches * self.kernels,
        )


NOTHING = Work()
