"""The sections of the configuration about sampling and the engine that samples. Part of the tree in config.py. Pure."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollplex.config_section import Section


class VllmConfig(Section):
    """vLLM engines; their tensor-parallel degree is sharing.rollout_tp."""

    servers: int = Field(0, ge=0, description="Engines, each in a server process of its own; 0: one in this process.")
    engine_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Dtype of the engine's weights and compute; absent: model.dtype."
    )
    max_sequence_tokens: int | None = Field(
        None, ge=1, description="Most tokens of a prompt with its response; absent: as many as the model was made for."
    )
    kv_cache_gib: float = Field(
        4.0, gt=0, description="Memory of the KV cache on each device, in GiB; room for one longest sequence at least."
    )
    enforce_eager: bool = Field(False, description="Neither compile the model nor capture CUDA graphs.")
    sleep: bool = Field(
        False, description="Release the engine's weights and KV cache while the policy is updated (not on CPU)."
    )
    bucket_mib: int = Field(
        256, ge=1, description="Weights pushed into other processes at a time, in MiB; a larger tensor goes alone."
    )
    start_timeout_s: float = Field(600.0, gt=0, description="Deadline for the start of a server process.")
    call_timeout_s: float = Field(
        300.0, gt=0, description="Deadline for a decoding step, and for a push, sleep or wake of an engine."
    )


class RolloutConfig(Section):
    """How responses are sampled."""

    engine: Literal["local", "vllm"] = Field(
        "local", description="local: decode on the training weights themselves. vllm: push weights into vLLM."
    )
    vllm: VllmConfig = Field(default_factory=VllmConfig, description="How vLLM engines are built.")
    prompts_per_step: int = Field(4, ge=1, description="Distinct prompts of one rollout.")
    num_generations: int = Field(8, ge=1, description="Responses per prompt (G).")
    max_completion_length: int = Field(64, ge=1, description="Most tokens of a response.")
    temperature: float = Field(1.0, gt=0, description="Softmax temperature, in sampling and in every log-prob.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus probability; 1 is off.")
    top_k: int = Field(0, ge=0, description="Keep the k most likely tokens; 0 is off.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Keep tokens of at least min_p times the top probability."
    )
    repetition_penalty: float = Field(
        1.0, gt=0, description="Divides positive (multiplies negative) logits of tokens already present; 1 is off."
    )
    stop_token_ids: tuple[int, ...] = Field((), description="Further ids that end a response, beside the model's own.")
    max_decode_rows: int = Field(256, ge=1, description="Most responses decoded together.")
    decode_graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Decode steps of fixed shapes, recorded once and replayed as CUDA graphs; on a CPU the same steps "
        "are called, with their padding. Up to 2 GiB of padded caches stay between rollouts. auto: on a GPU, in one "
        "process and without memory.cap_gib or run.memory_steps.",
    )

    @model_validator(mode="after")
    def _graphs_are_of_the_local_engine(self) -> Self:
        if self.decode_graphs == "on" and self.engine == "vllm":
            raise ValueError(
                "rollout.decode_graphs on does nothing with rollout.engine vllm, which captures graphs unless "
                "rollout.vllm.enforce_eager is on; leave it out"
            )
        return self
