"""What an unknown option name most likely means: a misspelling, a known name in another section, or a peer's name."""

from __future__ import annotations

import difflib

from rollplex.recipes.options import all_groups, all_options

_DEGREES = "sharing.train_tp and sharing.rollout_tp, for as many processes as torchrun starts"

# Names of TRL 1.16 and verl 0.9 that people bring along -> what to use here. Keys are last parts, lower case.
PEER_NAMES: dict[str, str] = {
    "n": "rollout.num_generations",
    "group_size": "rollout.num_generations",
    "num_return_sequences": "rollout.num_generations",
    "num_generations_eval": "evaluation takes one greedy response per row: run.eval_rows",
    "train_batch_size": "rollout.prompts_per_step (prompts, not responses)",
    "gen_batch_size": "rollout.prompts_per_step (prompts, not responses)",
    "generation_batch_size": "rollout.prompts_per_step times rollout.num_generations is the number of responses",
    "per_device_train_batch_size": "rollout.prompts_per_step (prompts, not responses) and, for what fits at once, "
    "train.micro_batch_tokens",
    "per_device_eval_batch_size": "run.eval_rows is the number of rows; rollout.max_decode_rows bounds a batch",
    "gradient_accumulation_steps": "micro-batches come from train.micro_batch_tokens and never change the update; "
    "rollout.prompts_per_step is the number of prompts",
    "ppo_mini_batch_size": "algorithm.steps_per_generation (optimizer steps per rollout)",
    "mini_batch_size": "algorithm.steps_per_generation (optimizer steps per rollout)",
    "ppo_micro_batch_size": "train.micro_batch_tokens (a token budget)",
    "ppo_micro_batch_size_per_gpu": "train.micro_batch_tokens (a token budget)",
    "log_prob_micro_batch_size_per_gpu": "train.micro_batch_tokens (a token budget)",
    "ppo_max_token_len_per_gpu": "train.micro_batch_tokens",
    "use_dynamic_bsz": "micro-batches are always formed by tokens: train.micro_batch_tokens",
    "ppo_epochs": "algorithm.num_iterations",
    "num_train_epochs": "train.max_steps (rollouts; an epoch is the number of rows / rollout.prompts_per_step)",
    "total_epochs": "train.max_steps (rollouts; an epoch is the number of rows / rollout.prompts_per_step)",
    "total_training_steps": "train.max_steps",
    "max_prompt_length": "data.max_prompt_tokens (prompts over it are refused or dropped, never cut)",
    "filter_overlong_prompts": "data.overlong=drop with data.max_prompt_tokens",
    "truncation": "data.overlong (error or drop; prompts are never cut)",
    "max_response_length": "rollout.max_completion_length",
    "max_new_tokens": "rollout.max_completion_length",
    "max_tokens": "rollout.max_completion_length",
    "max_model_len": "data.max_prompt_tokens, rollout.max_completion_length, and rollout.vllm.max_sequence_tokens",
    "gpu_memory_utilization": "rollout.vllm.kv_cache_gib; the local engine is bounded by rollout.max_decode_rows",
    "tensor_model_parallel_size": _DEGREES,
    "tensor_parallel_size": _DEGREES,
    "tensor": _DEGREES,
    "ulysses_sequence_parallel_size": "prompts are not divided among processes; " + _DEGREES,
    "fsdp_size": "replicas are processes / sharing.train_tp; FSDP2 divides weights among them",
    "n_gpus_per_node": "torchrun --nproc-per-node, and " + _DEGREES,
    "nproc_per_node": "torchrun --nproc-per-node, and " + _DEGREES,
    "clip_ratio": "algorithm.epsilon",
    "clip_ratio_low": "algorithm.epsilon",
    "clip_ratio_high": "algorithm.epsilon_high",
    "clip_ratio_c": "algorithm.delta",
    "cliprange": "algorithm.epsilon",
    "kl_coef": "algorithm.beta",
    "kl_loss_coef": "algorithm.beta",
    "kl_penalty": "algorithm.kl_estimator (kl is k1, mse is k2, low_var_kl is k3)",
    "kl_loss_type": "algorithm.kl_estimator (kl is k1, mse is k2, low_var_kl is k3), with use_bias_correction_kl=off",
    "use_kl_loss": "algorithm.beta above 0, with kl_in_reward off",
    "use_kl_in_reward": "algorithm.kl_in_reward with beta above 0",
    "adv_estimator": "algorithm.loss_type (rloo and reinforce_pp set the advantage too)",
    "loss_agg_mode": "algorithm.loss_type (token-mean is dapo, seq-mean-token-mean is grpo, seq-mean-token-sum-norm is "
    "dr_grpo)",
    "loss_mode": "algorithm.loss_type",
    "policy_loss_type": "algorithm.loss_type",
    "norm_adv_by_std_in_grpo": "algorithm.scale_rewards (group or none)",
    "filter_groups": "algorithm.dynamic_sampling=resample",
    "max_num_gen_batches": "algorithm.dynamic_sampling_max_rounds",
    "vllm_importance_sampling_correction": "algorithm.mismatch_correction",
    "vllm_importance_sampling_mode": "algorithm.mismatch_correction",
    "vllm_importance_sampling_clip_max": "algorithm.mismatch_clip_max",
    "vllm_importance_sampling_cap": "algorithm.mismatch_clip_max",
    "vllm_importance_sampling_clip_min": "algorithm.mismatch_clip_max (ratios are bounded above only)",
    "rollout_is": "algorithm.mismatch_correction",
    "rollout_is_threshold": "algorithm.mismatch_clip_max",
    "lr": "train.learning_rate",
    "lr_warmup_steps": "train.warmup_steps",
    "warmup_ratio": "train.warmup_steps (a number of optimizer steps)",
    "clip_grad": "train.max_grad_norm",
    "gradient_checkpointing": "train.prefix_activations=checkpoint or recompute",
    "enable_gradient_checkpointing": "train.prefix_activations=checkpoint or recompute",
    "bf16": "model.dtype=bfloat16",
    "fp16": "model.dtype=bfloat16 or float32",
    "torch_dtype": "model.dtype",
    "model_name_or_path": "model.path",
    "model_path": "model.path",
    "freeze_vision_tower": "model.freeze_vision",
    "freeze_vit": "model.freeze_vision",
    "freeze_vision_encoder": "model.freeze_vision",
    "freeze_visual_encoder": "model.freeze_vision",
    "use_peft": "model.lora={} (its defaults) or model.lora.r",
    "lora_r": "model.lora.r",
    "lora_rank": "model.lora.r",
    "lora_target_modules": "model.lora.target_modules",
    "dataset_name": "data.task=files with data.path",
    "train_files": "data.task=files with data.path",
    "val_files": "data.eval_split",
    "shuffle_dataset": "data.shuffle",
    "custom_reward_function": "rewards.reward_funcs (file.py:function)",
    "save_freq": "run.save_steps",
    "test_freq": "run.eval_steps",
    "logger": "run.report_to",
    "log_completions": "run.log_completions_steps",
    "default_local_dir": "run.output_dir",
    "resume_mode": "run.resume_from_checkpoint=auto",
    "resume_from": "run.resume_from_checkpoint",
    "logging_steps": "every step is logged",
    "max_grad": "train.max_grad_norm",
    "num_workers": "data.media_workers",
    "dataloader_num_workers": "data.media_workers",
    "use_prefix_grouper": "train.share_prefix",
}
_VLLM = "here: rollout.engine=vllm, with the options of rollout.vllm"


def hint_for(name: str) -> str:
    """A remedy for the unknown `name` (any dotted form), as the end of a sentence; empty when there is none."""
    leaf = name.rpartition(".")[2]
    exact = [key for key in (*all_options(), *all_groups()) if key.rpartition(".")[2] == leaf]
    if exact:
        return f"did you mean {_either(exact)}?"
    peer = PEER_NAMES.get(leaf.lower()) or PEER_NAMES.get(name.partition(".")[0].lower())
    if peer is not None:
        return f"here: {peer}"
    near = _nearest(name, leaf)
    if near:
        return f"did you mean {_either(near)}?"
    if "vllm" in name.lower():
        return _VLLM
    return "`rollplex train --help` lists every option"


def _nearest(name: str, leaf: str) -> list[str]:
    """Up to three known keys: those with a close full name first, then those with a close last part."""
    known = [*all_options(), *all_groups()]
    close = (
        difflib.get_close_matches(name.lower(), [k for k in known if "." in k], n=2, cutoff=0.82) if "." in name else []
    )
    leaves = {key.rpartition(".")[2] for key in known}
    for match in difflib.get_close_matches(leaf.lower(), sorted(leaves), n=2, cutoff=0.7):
        close += [key for key in known if key.rpartition(".")[2] == match and key not in close]
    return close[:3]


def _either(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + f" or {keys[-1]}"
