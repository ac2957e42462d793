"""The section of the configuration about advantages, loss and KL. Part of the tree in config.py. Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollplex.config_section import Section

CorrectionMode = Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class AlgorithmConfig(Section):
    """Advantages, loss, KL and mismatch correction."""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo", "reinforce_pp"] = Field(
        "dapo",
        description="Policy loss. gspo is grpo with importance_sampling_level=sequence; rloo and reinforce_pp also set "
        "the advantage.",
    )
    beta: float = Field(0.0, ge=0, description="Weight of the KL to the reference; 0: no reference model.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Per-token KL estimator.")
    use_bias_correction_kl: bool = Field(
        True,
        description="Multiply the KL in the loss by the probability ratio, so that (with a ratio per token) its "
        "gradient is that of the KL whatever the estimator; off: the estimator alone, as verl does.",
    )
    kl_in_reward: bool = Field(
        False, description="Subtract beta times the response's KL from its reward instead of adding it to the loss."
    )
    epsilon: float = Field(0.2, ge=0, description="Lower clip of the probability ratio.")
    epsilon_high: float | None = Field(None, ge=0, description="Upper clip; absent: epsilon.")
    delta: float | None = Field(
        None, gt=0, description="Upper bound of the unclipped branch (two-sided clipping); absent: none."
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="Ratio per token or per sequence."
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group", description="Standard deviation that divides advantages."
    )
    num_iterations: int = Field(1, ge=1, description="Epochs over one rollout.")
    steps_per_generation: int = Field(
        1,
        ge=1,
        description="Optimizer steps per epoch over one rollout; divides prompts_per_step. TRL counts "
        "accumulated micro-batches under this name.",
    )
    mask_truncated_completions: bool = Field(
        False, description="Leave responses cut at max_completion_length out of the loss."
    )
    mismatch_correction: CorrectionMode | None = Field(
        None,
        description="Correct for rollout log-probs that differ from the trainer's; absent: sequence_mask with "
        "rollout.engine=vllm, off with the local engine, whose log-probs are the trainer's.",
    )
    mismatch_clip_max: float = Field(3.0, gt=0, description="Ratio above which the correction truncates or masks.")
    dynamic_sampling: Literal["off", "resample"] = Field(
        "off", description="Replace groups whose rewards are all equal by new prompts."
    )
    dynamic_sampling_max_rounds: int = Field(4, ge=1, description="Most extra rollouts of one step.")
    dynamic_sampling_exhausted: Literal["train", "skip", "stop"] = Field(
        "train", description="After the last round: train on what there is, skip the step, or stop."
    )

    @property
    def kl_by_ratio(self) -> bool:
        """Whether there is a KL in the loss, multiplied by the ratio."""
        return self.use_bias_correction_kl and self.beta > 0 and not self.kl_in_reward
