"""The section of the configuration that says what devices a plan is made for. Part of the tree in config.py. Pure.

Defaults of the bandwidths are those of an 80 GB Hopper GPU (NVIDIA's H100 data sheet: 3.35 TB/s, 989 TFLOP/s dense in
bf16, PCIe 5 x16 of 64 GB/s each way), the link and the products lowered to what copies and large products reach.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollplex.config_section import Section


class MemoryConfig(Section):
    """What `rollplex plan` assumes about the devices, and the cap that memory plans keep to."""

    cap_gib: float | None = Field(
        None,
        gt=0,
        description="Device memory that a plan may use, in GiB; absent: only what would be held is counted. `rollplex "
        "train` carries its plan out: what it holds elsewhere or computes again follows from it (one process; needs "
        "data.max_prompt_tokens).",
    )
    devices: int = Field(1, ge=1, description="Devices of the whole job; a multiple of both degrees of sharing.")
    sequence_parallel: bool = Field(
        True, description="Share out activations between norms too among the ranks of training's tensor parallelism."
    )
    shard_optimizer: bool = Field(True, description="Divide optimizer state among the training replicas.")
    kernels: Literal["eager", "fused"] = Field(
        "eager",
        description="What a layer saves for its backward: eager, as the modules that this package runs do; fused, as "
        "norms, attention and SwiGLU of Megatron or vLLM do.",
    )
    visual_share: float = Field(
        1.0, ge=0, le=1, description="Part of a prompt's tokens that the vision tower makes; 1 is the most."
    )
    stream_chunk_mib: int = Field(
        512, ge=1, description="Optimizer state that streams through the device at a time, in MiB; two are in flight."
    )
    host_link_gb_s: float = Field(
        50.0, gt=0, description="Copies between device and pinned host memory each way, in GB/s."
    )
    device_memory_gb_s: float = Field(3350.0, gt=0, description="Bandwidth of device memory, in GB/s.")
    device_tflops: float = Field(400.0, gt=0, description="Matrix products really reached, in TFLOP/s.")
