"""The section of the configuration about what runs when. Part of the tree in config.py. Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollplex.config_section import Section


class ScheduleConfig(Section):
    """When each phase of a step runs: the order, and what runs beside decoding."""

    name: str = Field(
        "rollplex",
        description="serial: phase after phase; rollplex: prefixes beside decoding, the same bits; stream: besides, "
        "complete groups are trained on while others decode; or 'module:Name'.",
    )
    overlap: Literal["off", "on", "auto"] = Field(
        "auto",
        description="Passes beside decoding: never, always, or as long as they hide more than they slow decoding down.",
    )
    unit_tokens: int = Field(
        1024,
        ge=1,
        description="Prompt tokens of one prefix pass, the unit that is scheduled; a longer prompt stands alone. The "
        "same under every schedule and overlap, since it decides the order of sums. At most train.micro_batch_tokens "
        "count, and with dynamic sampling each prompt is a unit.",
    )
    chunk_tokens: int | None = Field(
        None,
        ge=32,
        description="Prompt tokens that one product, norm or attention call of a prefix pass takes: longer passes run "
        "each layer in chunks, so that no kernel holds decoding up for long on a GPU; absent: whole passes. The same "
        "under every schedule and overlap, since it decides the order of sums; at least 32, below which kernels are "
        "mostly launches. The vision tower is not cut.",
    )
    decode_threads: int | None = Field(
        None, ge=1, description="CPU threads of decoding; absent: all that the window does not take."
    )
    window_threads: int | None = Field(
        None, ge=1, description="CPU threads of passes beside decoding; absent: half, or what decode_threads leaves."
    )
    window_sms: int | None = Field(
        None,
        ge=1,
        description="Multiprocessors of a GPU that passes beside decoding may use, rounded up as the driver needs; "
        "decoding may use all. Absent: passes take what decoding, at high priority, leaves. Needs "
        "train.prefix_activations=recompute where passes with gradients run there.",
    )
    pass_timeout_s: float = Field(
        3600.0, gt=0, description="Seconds after which a pass beside decoding counts as hung and ends the run."
    )
