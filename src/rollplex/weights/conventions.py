"""How Hugging Face, Megatron-Core and vLLM lay out the weights of one tensor-parallel rank. Imports no torch.

    hf        every matrix apart, rows in order; key/value heads held whole, again on several ranks when TP > heads
    megatron  linear_qkv interleaved per key/value head: [q.. k v] [q.. k v] ..; when TP > heads those rows are still
              cut evenly, also inside a head; linear_fc1 = [gate; up]; vocabulary padded to 128 * TP
    vllm      qkv_proj = [Q; K; V]; key/value heads as in hf; gate_up_proj = [gate; up]; vocabulary padded to 64
Sources: Megatron-Core 0.13 (attention.py, tensor_parallel/layers.py, vocab padding in training/tokenizer), vLLM 0.17
(model_executor/layers/linear.py, vocab_parallel_embedding.py).
"""

from __future__ import annotations

from enum import StrEnum
from itertools import groupby
from math import ceil, lcm

from rollplex.config import SharingConfig
from rollplex.errors import ConfigError
from rollplex.models.shard_plan import Kind, PlanTensor, ShardPlan
from rollplex.weights.pieces import PADDING, Parameter, Piece, Unit, laid_out

MEGATRON_VOCAB_MULTIPLE = 128  # times the degree
VLLM_VOCAB_MULTIPLE = 64
Span = tuple[str, int, int]


class Layout(StrEnum):
    """Whose order of weights."""

    HF = "hf"
    MEGATRON = "megatron"
    VLLM = "vllm"

    @property
    def fuses(self) -> bool:
        """Are q, k, v one parameter, and gate, up another?"""
        return self is not Layout.HF


def units(plan: ShardPlan, layouts: tuple[Layout, Layout]) -> tuple[Unit, ...]:
    """What must be placed together under two layouts: fused groups when either side fuses, single tensors otherwise."""
    fused = any(layout.fuses for layout in layouts)
    groups = groupby(plan.tensors, lambda tensor: tensor.fused if fused and tensor.fused else tensor.name)
    return tuple(Unit(name, tuple(members)) for name, members in groups)


def piece(unit: Unit, layout: Layout, rank: int, degree: int, padded_vocab: int) -> Piece:
    """What rank `rank` of `degree` holds of `unit`. The degree divides what it must: see `check_degrees`."""
    if unit.kind in (Kind.REPLICATED, Kind.VISION):
        return _piece(unit, layout, [[(member.name, 0, member.shape[0])] for member in unit.members])
    if unit.kind is Kind.VOCAB:
        return _piece(unit, layout, [_vocab_spans(unit.members[0], rank, degree, padded_vocab)])
    if unit.kind is Kind.HEADS and layout is Layout.MEGATRON:
        return _piece(unit, layout, _interleaved(unit, rank, degree))
    spans = []
    for member in unit.members:
        whole = member.shape[unit.dim]
        if degree > member.heads > 0:  # whole heads, each on degree / heads ranks
            size, first = whole // member.heads, rank * member.heads // degree
        else:
            size, first = whole // degree, rank
        spans.append([(member.name, first * size, (first + 1) * size)])
    return _piece(unit, layout, spans)


def padded_vocabs(plan: ShardPlan, sharing: SharingConfig) -> tuple[int, int]:
    """Rows of embedding and head with padding, for (training, rollout).

    Raises ConfigError when the vocabulary does not divide and `sharing.vocab_padding` forbids to pad it.
    """
    vocab, layouts = plan.shape.text.vocab_size, (Layout(sharing.train_layout), Layout(sharing.rollout_layout))
    degrees = (sharing.train_tp, sharing.rollout_tp)
    if sharing.vocab_padding == "shared":
        both = _up_to(vocab, lcm(*degrees, VLLM_VOCAB_MULTIPLE if Layout.VLLM in layouts else 1))
        return both, both
    padded = []
    for name, layout, degree in zip(("train_tp", "rollout_tp"), layouts, degrees, strict=True):
        size = vocab
        if layout is Layout.VLLM:
            size = _up_to(vocab, VLLM_VOCAB_MULTIPLE)
        elif layout is Layout.MEGATRON and sharing.vocab_padding == "engine":
            size = _up_to(vocab, MEGATRON_VOCAB_MULTIPLE * degree)
        if sharing.vocab_padding == "hf" and size != vocab:
            raise ConfigError(
                f"sharing.vocab_padding hf forces the model's own vocabulary of {vocab} rows, and vllm pads to a "
                f"multiple of {VLLM_VOCAB_MULTIPLE}; set sharing.vocab_padding to shared"
            )
        if size % degree:
            raise ConfigError(
                f"sharing.{name} {degree} does not divide the {size} rows of the vocabulary, which the {layout} layout "
                f"does not pad under {sharing.vocab_padding}; set sharing.vocab_padding to shared"
            )
        padded.append(size)
    return padded[0], padded[1]


def check_degrees(plan: ShardPlan, sharing: SharingConfig) -> None:
    """Raises ConfigError, with the values that work, for degrees that divide neither the model nor each other."""
    train, rollout = sharing.train_tp, sharing.rollout_tp
    for name, degree, layout in (
        ("train_tp", train, sharing.train_layout),
        ("rollout_tp", rollout, sharing.rollout_layout),
    ):
        problem = _indivisible(plan, degree, Layout(layout))
        if problem:
            limit = plan.shape.text.num_heads
            good = [n for n in range(1, limit + 1) if not _indivisible(plan, n, Layout(layout))]
            raise ConfigError(f"sharing.{name} {degree} {problem}; set sharing.{name} to one of {_listed(good)}")
    if train % rollout and rollout % train:
        good = [
            n
            for n in range(1, plan.shape.text.num_heads + 1)
            if (train % n == 0 or n % train == 0) and not _indivisible(plan, n, Layout(sharing.rollout_layout))
        ]
        raise ConfigError(
            f"sharing.train_tp {train} and sharing.rollout_tp {rollout}: neither is a multiple of the other, so shards "
            f"do not nest; set sharing.rollout_tp to one of {_listed(good)}"
        )


def _indivisible(plan: ShardPlan, degree: int, layout: Layout) -> str:
    """Why `degree` cannot be; "" when it can."""
    text = plan.shape.text
    heads, kv_heads = text.num_heads, text.num_kv_heads
    if heads % degree:
        return f"does not divide the {heads} query heads"
    if kv_heads % degree and degree % kv_heads:
        return f"neither divides the {kv_heads} key/value heads nor is a multiple of them"
    if text.intermediate_size % degree:
        return f"does not divide the MLP width {text.intermediate_size}"
    if layout is Layout.MEGATRON and (2 * kv_heads * text.head_dim) % degree:
        return f"does not divide the {2 * kv_heads * text.head_dim} key and value rows, which megatron cuts evenly"
    return ""


def _piece(unit: Unit, layout: Layout, spans: list[list[Span]]) -> Piece:
    """Parameters from the spans of each member: one fused parameter, or one for each member."""
    if layout.fuses and len(unit.members) > 1:
        return Piece((Parameter(unit.name, laid_out([span for part in spans for span in part]), 0),))
    parameters, at = [], 0
    for member, part in zip(unit.members, spans, strict=True):
        parameter = Parameter(member.name, laid_out(part, at), at)
        parameters.append(parameter)
        at += parameter.length
    return Piece(tuple(parameters))


def _vocab_spans(tensor: PlanTensor, rank: int, degree: int, padded: int) -> list[Span]:
    rows, vocab = padded // degree, tensor.shape[0]
    start, stop = rank * rows, (rank + 1) * rows
    return [
        (tensor.name, min(start, vocab), min(stop, vocab)),
        (PADDING, max(start, vocab), max(stop, vocab)),
    ]


def _interleaved(unit: Unit, rank: int, degree: int) -> list[list[Span]]:
    """Rows `rank` of `degree` equal shares of [q.. k v] per key/value head, as one member's spans.

    Always a fused unit: the megatron layout fuses, so q, k and v are placed together.
    """
    groups = min(member.heads for member in unit.members)
    order: list[Span] = []
    for group in range(groups):
        for member in unit.members:
            rows = member.shape[0] // groups
            order.append((member.name, group * rows, (group + 1) * rows))
    share = sum(member.shape[0] for member in unit.members) // degree
    start, stop, at = rank * share, (rank + 1) * share, 0
    spans = []
    for name, first, last in order:
        low, high = max(start, at), min(stop, at + last - first)
        if low < high:
            spans.append((name, first + low - at, first + high - at))
        at += last - first
    return [spans]


def _up_to(size: int, multiple: int) -> int:
    return ceil(size / multiple) * multiple


def _listed(values: list[int]) -> str:
    return ", ".join(str(value) for value in values)
