"""Devices as numbers: what the data sheet promises, and how much of it is reached.

Peaks are dense, without sparsity, products in bf16 with fp32 sums. Links are one way and per device: a data sheet's
NVLink figure counts both ways, so half of it stands here. Between nodes every record takes one 400 Gb/s adapter per
device (50 GB/s), the usual build of 8-GPU Hopper nodes, unless it says otherwise: change it with `dataclasses.replace`.

| device | source of its figures |
|---|---|
| H100 | NVIDIA H100 Tensor Core GPU data sheet, SXM5: 989 TFLOP/s, 80 GB, 3.35 TB/s, NVLink 900 GB/s, PCIe 5 |
| H800 | the H100's chip and memory; NVLink 400 GB/s (export variant; vendors' data sheets) |
| H200 | NVIDIA H200 data sheet, SXM: as H100, with 141 GB and 4.8 TB/s |
| H20 | vendors' data sheets (export variant): 148 TFLOP/s, 96 GB, 4.0 TB/s, NVLink 900 GB/s |
| A100-80G | NVIDIA A100 data sheet, SXM 80 GB: 312 TFLOP/s, 2.039 TB/s, NVLink 600 GB/s, PCIe 4 |
| A100-40G-PCIe | the same sheet, PCIe 40 GB: 1.555 TB/s, no NVLink |
| RTX4090 | NVIDIA Ada GPU architecture white paper: 165.2 TFLOP/s, 24 GB, 1.008 TB/s, PCIe 4, no NVLink |

Latencies are assumptions, of one hop of a collective (it takes log2 of its devices): 4 us over NVLink, 6 us over PCIe,
10 us across nodes, so that a small all-reduce over 8 devices takes 12 us, in the order of what NCCL's tests print. The
CPU of a machine has no data sheet that says what is reached: `cpu` is where a calibration (calibrate.py) starts, with
nominal peaks of which only the product with a fitted efficiency means anything.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any

from rollplex.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes per second that one device sends, and seconds of one hop however little it sends."""

    bandwidth: float
    latency_s: float


# Fields that must be above 0; the others are costs, which may be nothing.
_REACHED = ("matmul", "attention", "memory", "link", "decode")
_POSITIVE = ("flops", "memory_bytes", "memory_bandwidth", "host_bandwidth", "devices_per_node")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What of the peaks is reached, in parts of 1, and what every launch costs on top. All but `link` can be fitted.

    The defaults are assumptions for bf16 on data-centre GPUs, not measurements: large cuBLAS products reach 65-80 % of
    the sheet, FlashAttention 2 forward and backward 35-50 % on Hopper, copies 80-90 % of the bandwidth, NCCL rings
    70-85 % of a link. `rollplex calibrate` replaces them.
    """

    matmul: float = 0.65
    attention: float = 0.40
    memory: float = 0.80
    link: float = 0.75
    kernel_s: float = 2e-6  # per kernel, beyond its operations and bytes
    decode_step_s: float = 1e-3  # per decode step: sampling, scheduling, everything on the host
    decode: float = 1.0  # rates in decode steps, as a part of those in passes: fewer threads, or a CPU
    decode_kernels: float = 1.0  # launches in decode steps, as a part of `kernel_s`: another program than passes

    def __post_init__(self) -> None:
        for name in _REACHED:
            if not 0 < getattr(self, name):
                raise ConfigError(f"efficiency {name} is {getattr(self, name)}, needed above 0")
        if min(self.kernel_s, self.decode_step_s, self.decode_kernels) < 0:
            raise ConfigError(f"seconds per launch and per decode step must not be negative, found {self}")


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device and how it is wired. Bytes, operations and seconds; see the module's head for what they are."""

    name: str
    flops: float
    memory_bytes: float
    memory_bandwidth: float
    intra: Link  # to devices of its node
    inter: Link  # to devices of other nodes
    host_bandwidth: float  # to pinned host memory, each way
    devices_per_node: int
    source: str
    efficiency: Efficiency = Efficiency()

    @property
    def matmul_rate(self) -> float:
        """Operations per second that products of weights reach."""
        return self.flops * self.efficiency.matmul

    @property
    def attention_rate(self) -> float:
        """Operations per second that attention reaches."""
        return self.flops * self.efficiency.attention

    @property
    def byte_rate(self) -> float:
        """Bytes per second that kernels move."""
        return self.memory_bandwidth * self.efficiency.memory

    @property
    def decoding(self) -> Hardware:
        """The device as decode steps find it."""
        own = self.efficiency
        if own.decode == own.decode_kernels == 1.0:
            return self
        rates = {name: getattr(own, name) * own.decode for name in ("matmul", "attention", "memory")}
        return self.reaching(**rates, kernel_s=own.kernel_s * own.decode_kernels)

    def link(self, span: int) -> Link:
        """The slowest link of a group of devices whose first and last are `span` - 1 apart in rank order."""
        return self.intra if span <= self.devices_per_node else self.inter

    def reaching(self, **efficiencies: float) -> Hardware:
        """The same device with other efficiencies."""
        return dataclasses.replace(self, efficiency=dataclasses.replace(self.efficiency, **efficiencies))


_GB, _TB, _TFLOPS = 1e9, 1e12, 1e12
_NETWORK = Link(50 * _GB, 10e-6)


def _nvlink(both_ways_gb_s: float) -> Link:
    return Link(both_ways_gb_s / 2 * _GB, 4e-6)


_PCIE4, _PCIE5 = 32 * _GB, 64 * _GB

HARDWARE: dict[str, Hardware] = {
    device.name: device
    for device in (
        Hardware("h100", 989 * _TFLOPS, 80 * _GB, 3.35 * _TB, _nvlink(900), _NETWORK, _PCIE5, 8,
                 "NVIDIA H100 data sheet (SXM5)"),
        Hardware("h800", 989 * _TFLOPS, 80 * _GB, 3.35 * _TB, _nvlink(400), _NETWORK, _PCIE5, 8,
                 "NVIDIA H100 data sheet (SXM5), NVLink of the H800"),
        Hardware("h200", 989 * _TFLOPS, 141 * _GB, 4.8 * _TB, _nvlink(900), _NETWORK, _PCIE5, 8,
                 "NVIDIA H200 data sheet (SXM)"),
        Hardware("h20", 148 * _TFLOPS, 96 * _GB, 4.0 * _TB, _nvlink(900), _NETWORK, _PCIE5, 8,
                 "vendors' data sheets of the H20"),
        Hardware("a100-80g", 312 * _TFLOPS, 80 * _GB, 2.039 * _TB, _nvlink(600), Link(25 * _GB, 10e-6), _PCIE4, 8,
                 "NVIDIA A100 data sheet (SXM 80 GB); 200 Gb/s a device between nodes"),
        Hardware("a100-40g-pcie", 312 * _TFLOPS, 40 * _GB, 1.555 * _TB, Link(_PCIE4, 6e-6), Link(25 * _GB, 10e-6),
                 _PCIE4, 8, "NVIDIA A100 data sheet (PCIe 40 GB); 200 Gb/s a device between nodes"),
        Hardware("rtx4090", 165.2 * _TFLOPS, 24 * _GB, 1.008 * _TB, Link(_PCIE4, 6e-6), Link(12.5 * _GB, 10e-6),
                 _PCIE4, 8, "NVIDIA Ada architecture white paper; 100 Gb/s a device between nodes, assumed"),
    )
}  # fmt: skip
"""By name. A machine's CPU is no entry: its record is a calibration file's (`hardware_from_facts`)."""


def cpu(cores: int, memory_bytes: float) -> Hardware:
    """This machine's cores as one device, for `calibrate.fit` to start from: nominal 64 GFLOP/s in fp32 and 8 GB/s a
    core (16 operations and 4 bytes a cycle at 2 to 4 GHz), and what calling an operation from Python takes.

    A decode step has as many kernels for any batch: their launches are part of what a step takes on the host. The
    start is where fits to runs of four shapes have ended on two cores of an AMD EPYC, rounded: what the spans of one
    shape do not tell stays near it (docs/planning.md). Attention starts as fast as products, as prompts that are long
    enough to tell have it.
    """
    start = Efficiency(
        matmul=1.0,
        attention=1.0,
        memory=0.6,
        link=1.0,
        kernel_s=5e-5,
        decode_step_s=2e-3,
        decode=0.5,
        decode_kernels=0.0,
    )
    own = Link(8 * _GB, 1e-6)  # one device: nothing is sent
    source = "nominal rates; efficiencies start where fits on two cores of an AMD EPYC ended"
    return Hardware("cpu", 64e9 * cores, memory_bytes, 8 * _GB * cores, own, own, 8 * _GB, 1, source, start)


def hardware(name: str) -> Hardware:
    """The record of that name. Raises ConfigError for an unknown one."""
    if name not in HARDWARE:
        longer = [known for known in HARDWARE if name and name.lower() in known]
        near = longer or difflib.get_close_matches(name.lower(), HARDWARE, n=1, cutoff=0.0)
        raise ConfigError(
            f"--hardware is {name!r}; did you mean {' or '.join(near)}? known: {', '.join(HARDWARE)}, or a file that "
            "`rollplex calibrate` wrote"
        )
    return HARDWARE[name]


def hardware_facts(device: Hardware) -> dict[str, Any]:
    """Plain data for JSON; `hardware_from_facts` reads it back."""
    return dataclasses.asdict(device)


def hardware_from_facts(facts: dict[str, Any]) -> Hardware:
    """The record that `hardware_facts` gave. Raises ConfigError for a field that is missing, unknown or no number."""
    try:
        parts = {"intra": Link(**facts["intra"]), "inter": Link(**facts["inter"])}
        device = Hardware(**{**facts, **parts, "efficiency": Efficiency(**facts["efficiency"])})
    except (KeyError, TypeError) as error:
        raise ConfigError(f"a calibration file needs the fields of a Hardware record: {error}") from error
    numbers = {name: facts[name] for name in _POSITIVE}
    numbers |= {f"{link} bandwidth": facts[link]["bandwidth"] for link in parts}
    numbers |= {f"efficiency {name}": getattr(device.efficiency, name) for name in _REACHED}
    costs = {f"{link} latency_s": facts[link]["latency_s"] for link in parts}
    costs |= {f"efficiency {f.name}": getattr(device.efficiency, f.name) for f in dataclasses.fields(Efficiency)}
    for name, value in (costs | numbers).items():
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf or (name in numbers and value == 0):
            least = "above 0" if name in numbers else "of 0 or more"
            raise ConfigError(f"a calibration file has {name} {value!r}, needed a number {least}")
    return device
