"""The sharing table of `rollplex plan`: which weights training and rollout hold once, and what the others cost."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rollplex.config import Config
from rollplex.models.shapes import shape_of
from rollplex.models.shard_plan import Kind, shard_plan
from rollplex.planner.memory import refuse_experts
from rollplex.weights.layout import Classified, Sharing, SharingPlan, plan_sharing
from rollplex.weights.transfer import received_numel

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def sharing_facts(config: Config) -> dict[str, Any]:
    """Shares of the language model's parameters by class, and bytes per device.

    `aligned`, `transposed` and `rebuilt` are fractions that sum to 1. The vision tower, whole on every rank of both
    sides, is counted apart in `vision_bytes`. `second_copy_bytes` is what an engine with weights of its own would hold,
    `missing_bytes` what it needs beyond training's shard, `rebuild_buffer_bytes` what sharing holds besides the backing
    and `received_bytes` what a device gets from others at publish (the largest over devices).
    Raises ConfigError for degrees that do not divide, ModelError for a model whose sizes are not known.
    """
    size, sharing, shape = DTYPE_BYTES[config.model.dtype], config.sharing, shape_of(config.model)
    refuse_experts(shape, "sharing")
    plan = plan_sharing(shard_plan(shape), sharing)
    language = [unit for unit in plan.units if unit.unit.kind is not Kind.VISION]
    parameters = sum(unit.unit.numel for unit in language)
    received = [sum(received_numel(plan, c.unit, device) for c in language) for device in range(plan.num_devices)]
    busiest = received.index(max(received))
    train, rollout = (sum(_held(plan, c, side) for c in language) * size for side in (0, 1))
    layout = plan.device(busiest)
    shares = {str(kind): sum(c.unit.numel for c in language if c.sharing is kind) / parameters for kind in Sharing}
    return {
        **shares,
        "train_tp": sharing.train_tp,
        "rollout_tp": sharing.rollout_tp,
        "train_layout": sharing.train_layout,
        "rollout_layout": sharing.rollout_layout,
        "dtype": config.model.dtype,
        "devices": plan.num_devices,
        "padded_vocab": {"train": plan.padded[0], "rollout": plan.padded[1]},
        "parameters": parameters,
        "model_bytes": parameters * size,
        "vision_bytes": sum(c.unit.numel for c in plan.units if c.unit.kind is Kind.VISION) * size,
        "train_shard_bytes": train,
        "second_copy_bytes": rollout,
        "missing_bytes": max(0, rollout - train),
        "rebuild_buffer_bytes": sum(_held(plan, c, 1) for c in language if c.sharing is Sharing.REBUILT) * size,
        "received_bytes": max(received) * size,
        "backing_bytes": layout.backing_numel * size,
        "tensors": [_row(plan, group, parameters, busiest, size) for group in _alike(language)],
    }


def sharing_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The table, then bytes per device."""
    yield (
        f"training TP {facts['train_tp']} ({facts['train_layout']}), rollout TP {facts['rollout_tp']} "
        f"({facts['rollout_layout']}), {facts['dtype']}, in blocks of {facts['devices']} devices; "
        f"{facts['parameters']:,} parameters of the language model"
    )
    yield ""
    heads = ("tensors", "class", "count", "size", "share", "received")
    rows = [
        (row["name"], row["class"], str(row["count"]), _size(row["bytes"]), f"{row['share']:.2%}",
         _size(row["received_bytes"]))
        for row in facts["tensors"]
    ]  # fmt: skip
    rows += [
        ("all " + kind, "", str(sum(row["count"] for row in facts["tensors"] if row["class"] == kind)),
         _size(sum(row["bytes"] for row in facts["tensors"] if row["class"] == kind)), f"{facts[kind]:.2%}",
         _size(sum(row["received_bytes"] for row in facts["tensors"] if row["class"] == kind)))
        for kind in Sharing
    ]  # fmt: skip
    yield from _columns([heads, *rows])
    reasons = dict.fromkeys(row["reason"] for row in facts["tensors"] if row["reason"])
    if reasons:
        yield ""
    for reason in reasons:
        yield f"rebuilt: {', '.join(row['name'] for row in facts['tensors'] if row['reason'] == reason)}: {reason}"
    yield ""
    yield "per device"
    for name, words in (
        ("train_shard_bytes", "training's shard"),
        ("second_copy_bytes", "a second full copy for the rollout"),
        ("missing_bytes", "of it missing in training's shard"),
        ("rebuild_buffer_bytes", "rebuild buffers when shared"),
        ("received_bytes", "received at publish"),
        ("backing_bytes", "backing that both sides share, vision tower included"),
        ("vision_bytes", "vision tower, whole on every device"),
    ):
        yield f"{_size(facts[name]):>10}  {words}"


def _alike(language: Sequence[Classified]) -> Iterator[list[Classified]]:
    """Units that differ in the number of their layer only, with one class and reason."""
    ordered = sorted(range(len(language)), key=lambda i: (_pattern(language[i]), language[i].sharing, i))
    groups = [
        [language[i] for i in members]
        for _, members in groupby(ordered, lambda i: (_pattern(language[i]), language[i].sharing))
    ]
    order = {_pattern(c): place for place, c in reversed(list(enumerate(language)))}
    yield from sorted(groups, key=lambda group: order[_pattern(group[0])])


def _pattern(classified: Classified) -> str:
    return re.sub(r"\.\d+\.", ".*.", classified.unit.name)


def _row(plan: SharingPlan, group: Sequence[Classified], parameters: int, device: int, size: int) -> dict[str, Any]:
    first, numel = group[0], sum(c.unit.numel for c in group)
    return {
        "name": _pattern(first),
        "kind": str(first.unit.kind),
        "class": str(first.sharing),
        "count": len(group),
        "bytes": numel * size,
        "share": numel / parameters,
        "train_bytes": sum(_held(plan, c, 0) for c in group) * size,
        "rollout_bytes": sum(_held(plan, c, 1) for c in group) * size,
        "received_bytes": sum(received_numel(plan, c.unit, device) for c in group) * size,
        "reason": first.reason,
    }


def _held(plan: SharingPlan, classified: Classified, side: int) -> int:
    """Elements of a rank's piece, the same on every rank; padding included."""
    return plan.pieces(classified.unit, 0)[side].length * classified.unit.cross


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Two columns of words, then numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _size(nbytes: int) -> str:
    """In the largest unit of which there is at least one. Example: "7.63 GiB"."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << bits:
            return f"{nbytes / (1 << bits):.2f} {unit}"
    return f"{nbytes} B"
