"""The one typed, frozen configuration tree: every option, its type, default, description, and what goes together.

Leaf names are TRL's where the meaning is the same. `rollplex.recipes.load` makes it from a YAML file and overrides.
Nothing in here imports torch: `rollplex --help` stays fast.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollplex.config_algorithm import AlgorithmConfig, CorrectionMode
from rollplex.config_devices import MemoryConfig
from rollplex.config_parallel import ParallelConfig
from rollplex.config_rollout import RolloutConfig, VllmConfig
from rollplex.config_schedule import ScheduleConfig
from rollplex.config_section import Section


class LoraConfig(Section):
    """Low-rank adapters through peft; absent: full fine-tuning."""

    r: int = Field(8, ge=1, description="Rank of the adapters.")
    lora_alpha: int = Field(16, ge=1, description="Scale numerator: updates are multiplied by lora_alpha / r.")
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="Names of the language model's linear layers that get an adapter; visual.NAME: the tower's.",
    )


class BuildConfig(Section):
    """A small model made from a configuration, for machines without a model hub."""

    family: str = Field("qwen2_5_vl", description="Model family to build: qwen2_5_vl or qwen3_vl.")
    hidden_size: int = Field(64, ge=32, description="Hidden size of the language model.")
    num_layers: int = Field(2, ge=1, description="Decoder layers.")
    num_heads: int = Field(2, ge=1, description="Query heads.")
    num_kv_heads: int = Field(1, ge=1, description="Key/value heads (grouped-query attention).")
    intermediate_size: int | None = Field(None, ge=1, description="MLP width; absent: twice the hidden size.")
    vocab_size: int = Field(
        512, ge=300, description="Vocabulary of the byte-level BPE tokenizer trained on the task's text."
    )
    vision_depth: int = Field(2, ge=1, description="Blocks of the vision tower.")
    vision_hidden_size: int = Field(32, ge=16, description="Hidden size of the vision tower.")
    vision_intermediate_size: int | None = Field(
        None, ge=1, description="MLP width of the vision tower; absent: twice its hidden size."
    )
    tie_word_embeddings: bool = Field(False, description="Share the embedding and the output head.")
    init_scale: float = Field(
        0.5,
        gt=0,
        description="Standard deviation of the initial matrices in units of 1/sqrt(width); 0.5 at width 625 is the "
        "usual 0.02. Small models learn to see sooner with 1.",
    )


class ModelConfig(Section):
    """Which model is trained, in which precision, and which part of it."""

    path: str | None = Field(
        None, description="Folder or hub id in Hugging Face format. Exactly one of path and build."
    )
    build: BuildConfig | None = Field(None, description="Build a small model from scratch instead of loading one.")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("float32", description="Dtype of weights and compute.")
    freeze_vision: bool = Field(
        False, description="Freeze the vision tower: no gradient, no optimizer state, features cached."
    )
    lora: LoraConfig | None = Field(None, description="Low-rank adapters; absent: full fine-tuning.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.build is None):
            found = "both (model.build=null drops the built one)" if self.path is not None else "neither"
            raise ValueError(f"needs exactly one of model.path and model.build, found {found}")
        return self


class DataConfig(Section):
    """Where rows come from and how media become tokens."""

    task: str = Field(
        "counting",
        description="counting | colour_shape | motion | mixed | easy_vqa | files, or 'module:Name' of a Task.",
    )
    path: str | None = Field(
        None,
        description="For task=files: JSONL, parquet, a saved datasets folder, or a hub id. '{split}' in a file's name "
        "stands for data.split or data.eval_split.",
    )
    split: str = Field("train", description="Split to train on.")
    eval_split: str | None = Field(None, description="Split for evaluation; absent: none.")
    num_rows: int | None = Field(
        None, ge=1, description="Use the first rows only, or the number of rows a synthetic task draws."
    )
    shuffle: bool = Field(True, description="Shuffle rows each epoch, keyed by the run seed.")
    image_size: int = Field(
        112, ge=28, description="Pixels per side of images that synthetic tasks draw, and of resized easy-VQA images."
    )
    num_images: int = Field(1, ge=1, description="Images per row of the counting task.")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Longest prompt with media expanded; absent: no limit."
    )
    overlong: Literal["error", "drop"] = Field(
        "error", description="A prompt over the limit: stop, or drop the row and count it. Never cut."
    )
    min_pixels: int | None = Field(
        None,
        ge=1,
        description="Smallest area of an image or video frame the processor scales to; absent: the processor's own.",
    )
    max_pixels: int | None = Field(
        None,
        ge=1,
        description="Largest area of an image or video frame the processor scales to; absent: the processor's own.",
    )
    video_fps: float = Field(2.0, gt=0, description="Frames per second sampled from video files.")
    max_frames: int = Field(64, ge=2, description="Most frames sampled from one video.")
    media_workers: int = Field(
        2, ge=1, description="Threads that decode media and run the processor ahead of the step."
    )
    media_timeout_s: float = Field(120.0, gt=0, description="Deadline for decoding one row's media.")


class RewardConfig(Section):
    """Verifiable rewards, called as TRL calls them."""

    reward_funcs: tuple[str, ...] = Field(
        (), description="'module:function' or 'file.py:function'; empty: the task's own reward."
    )
    reward_weights: tuple[float, ...] | None = Field(None, description="One weight per function; absent: all 1.")
    timeout_s: float = Field(60.0, gt=0, description="Deadline of one call of one reward function on one group.")
    on_timeout: Literal["error", "none"] = Field(
        "error", description="A call over its deadline: stop, or mark its rewards None and count them."
    )


class TrainConfig(Section):
    """The update: prefix sharing, micro-batches, optimizer."""

    share_prefix: bool = Field(
        True, description="Compute each prompt once per update (exact). off: the ordinary full-sequence path."
    )
    unshared_prefix: Literal["whole", "per_response"] = Field(
        "whole",
        description="With share_prefix off: each response in one pass with its prompt, or the prompt once per response "
        "in passes of their own that can move beside decoding (to measure hoisting without sharing).",
    )
    prefix_activations: Literal["graph", "checkpoint", "recompute"] = Field(
        "graph",
        description="Prefix activations between prefix pass and prefix backward: keep all, keep layer inputs, or run "
        "again. All exact.",
    )
    micro_batch_tokens: int = Field(
        4096,
        ge=1,
        description="Token budget of one forward/backward; a single longer sequence still runs alone. More on a GPU.",
    )
    max_steps: int = Field(
        100,
        ge=0,
        description="Rollouts to train on, each of algorithm.num_iterations x steps_per_generation optimizer steps, "
        "which TRL counts.",
    )
    learning_rate: float = Field(1e-6, ge=0, description="Peak learning rate of AdamW.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Shape of the schedule after warm-up."
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW beta2.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay (not on norms and biases).")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient norm is clipped to this.")


class SharingConfig(Section):
    """Tensor-parallel degrees and weight layouts of training and rollout, which share one copy of the weights."""

    train_tp: int = Field(1, ge=1, description="Tensor-parallel degree of training.")
    rollout_tp: int = Field(
        1, ge=1, description="Tensor-parallel degree of the rollout; a multiple or a divisor of train_tp."
    )
    train_layout: Literal["hf", "megatron", "vllm"] = Field(
        "hf",
        description="How training holds its weights: each matrix apart, QKV interleaved per key/value head with "
        "gate_up fused, or packed [Q; K; V] with gate_up fused.",
    )
    rollout_layout: Literal["hf", "megatron", "vllm"] = Field("hf", description="The same for the rollout engine.")
    vocab_padding: Literal["shared", "hf", "engine"] = Field(
        "shared",
        description="Rows of embedding and output head: padded alike on both sides as far as needed, forced to the "
        "model's own vocabulary, or by each engine's rule (Megatron 128 x TP, vLLM 64).",
    )


class WarmStartConfig(Section):
    """A supervised stage on the task's answers before RL."""

    steps: int = Field(0, ge=0, description="Supervised steps; 0: none.")
    batch_size: int = Field(64, ge=1, description="Rows per supervised step.")
    learning_rate: float = Field(
        1e-3, gt=0, description="Peak learning rate; linear warm-up over 5 %, then cosine to 0."
    )
    answer_column: str = Field("answer", description="Column that holds the target text.")
    path: str | None = Field(
        None, description="Folder that keeps the warm-started model; reused when it was made by the same settings."
    )


class RunConfig(Section):
    """Run folder, logging, checkpoints."""

    output_dir: str = Field("runs/rollplex", description="Run folder.")
    seed: int = Field(0, ge=0, description="Seed of data order, sampling and initial weights.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model lives; auto: the GPU when torch sees one, else the CPU."
    )
    num_threads: int | None = Field(None, ge=1, description="Torch threads; absent: all cores.")
    save_steps: int = Field(0, ge=0, description="Checkpoint every so many rollouts; 0: only at the end.")
    save_total_limit: int | None = Field(None, ge=1, description="Keep the newest checkpoints only.")
    resume_from_checkpoint: str | None = Field(
        None, description="A checkpoint folder, or 'auto' for the newest complete one in output_dir."
    )
    log_completions_steps: int = Field(
        10, ge=0, description="Write sampled completions with their pictures every so many steps; 0: never."
    )
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        (), description="Trackers that also receive the metrics."
    )
    eval_steps: int = Field(
        0,
        ge=0,
        description="Evaluate greedily on data.eval_split every so many steps; 0: only at the end, given a split.",
    )
    eval_rows: int = Field(200, ge=1, description="Rows of one evaluation.")
    trace_steps: tuple[int, ...] = Field(
        (), description="Steps, counted from 1, whose spans go to trace.json, for https://ui.perfetto.dev."
    )
    memory_steps: tuple[int, ...] = Field(
        (), description="Steps whose allocations are counted: planned against measured bytes in memory.jsonl."
    )


class Config(Section):
    """A whole run."""

    run: RunConfig = Field(default_factory=RunConfig, description="Run folder, seed, logging, checkpoints.")
    model: ModelConfig = Field(description="Which model.")
    data: DataConfig = Field(default_factory=DataConfig, description="Which rows.")
    rewards: RewardConfig = Field(default_factory=RewardConfig, description="Which rewards.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="How responses are sampled.")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="Advantage, loss, KL, correction.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="The update.")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="When each phase of a step runs.")
    sharing: SharingConfig = Field(
        default_factory=SharingConfig, description="One copy of the weights under two tensor-parallel degrees."
    )
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Training in several processes.")
    memory: MemoryConfig = Field(
        default_factory=MemoryConfig,
        description="What memory plans assume and keep to: `rollplex plan`'s, and a run's own under cap_gib.",
    )
    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig, description="Supervised stage before RL.")

    @property
    def mismatch_correction(self) -> CorrectionMode:
        """algorithm.mismatch_correction, or what it is when absent: TRL's for vLLM."""
        chosen = self.algorithm.mismatch_correction
        return chosen or ("sequence_mask" if self.rollout.engine == "vllm" else "off")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Raises ValueError with one line for each combination that cannot work, and for likely ones in which an
        option would silently do nothing."""
        problems = [
            *_sampling_problems(self),
            *_loss_problems(self),
            *_data_problems(self),
            *_schedule_problems(self),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _sampling_problems(config: Config) -> list[str]:
    rollout, algorithm = config.rollout, config.algorithm
    problems = []
    if rollout.engine == "local" and rollout.vllm != VllmConfig():
        problems.append("rollout.vllm does nothing with rollout.engine local; set rollout.engine=vllm or leave it out")
    if rollout.engine == "vllm" and config.model.dtype == "float64" and rollout.vllm.engine_dtype is None:
        problems.append("vLLM computes in float32 at most, model.dtype is float64; set rollout.vllm.engine_dtype")
    if rollout.prompts_per_step % algorithm.steps_per_generation:
        problems.append(
            f"algorithm.steps_per_generation {algorithm.steps_per_generation} does not divide rollout.prompts_per_step "
            f"{rollout.prompts_per_step}; each optimizer step takes as many whole groups"
        )
    if rollout.num_generations == 1 and algorithm.loss_type != "reinforce_pp":
        problems.append(
            "rollout.num_generations 1 gives every response advantage 0 with algorithm.loss_type "
            f"{algorithm.loss_type}, which compares the responses of a group; needed at least 2, or loss_type "
            "reinforce_pp"
        )
    elif rollout.num_generations == 1 and algorithm.dynamic_sampling == "resample":
        problems.append(
            "algorithm.dynamic_sampling resample needs rollout.num_generations of at least 2: the rewards of a group "
            "of one never differ"
        )
    return problems


def _loss_problems(config: Config) -> list[str]:
    algorithm = config.algorithm
    loss, scale = algorithm.loss_type, algorithm.scale_rewards
    problems = []
    if loss == "cispo" and algorithm.epsilon_high is None:
        problems.append(
            "algorithm.loss_type cispo needs algorithm.epsilon_high: there it is the largest importance weight itself, "
            "for instance 5.0"
        )
    if loss == "cispo" and algorithm.delta is not None:
        problems.append("algorithm.delta does nothing with algorithm.loss_type cispo, which has no unclipped branch")
    if loss == "rloo" and scale == "batch":
        problems.append("algorithm.scale_rewards batch does nothing with algorithm.loss_type rloo, which never divides")
    if loss == "reinforce_pp" and scale == "none":
        problems.append(
            "algorithm.scale_rewards none does nothing with algorithm.loss_type reinforce_pp, which divides by the "
            "deviation of the batch"
        )
    if loss == "rloo" and algorithm.importance_sampling_level == "sequence":
        problems.append(
            "algorithm.importance_sampling_level sequence does nothing with algorithm.loss_type rloo, whose ratio is "
            "that of the whole response"
        )
    if algorithm.kl_in_reward and algorithm.beta == 0:
        problems.append("algorithm.kl_in_reward on does nothing with algorithm.beta 0; needed beta above 0")
    return problems


def _schedule_problems(config: Config) -> list[str]:
    schedule, train = config.schedule, config.train
    problems = []
    if schedule.overlap == "on" and schedule.name == "serial":
        problems.append("schedule.overlap on does nothing with schedule.name serial; needed rollplex or stream, or off")
    closed = schedule.overlap == "off" or schedule.name == "serial"
    for option in ("window_threads", "window_sms"):
        if closed and (value := getattr(schedule, option)) is not None:
            problems.append(
                f"schedule.{option} {value} does nothing with schedule.name {schedule.name} and schedule.overlap "
                f"{schedule.overlap}: nothing runs beside decoding"
            )
    if train.unshared_prefix == "per_response" and train.share_prefix:
        problems.append("train.unshared_prefix per_response does nothing with train.share_prefix on; needed off")
    return problems


def _data_problems(config: Config) -> list[str]:
    data, rewards = config.data, config.rewards
    problems = []
    built_in = ":" not in data.task
    if data.path is not None and built_in and data.task != "files":
        problems.append(
            f"data.path {data.path!r} does nothing with data.task {data.task}, whose rows are its own; set "
            "data.task=files to train on it, or leave it out"
        )
    if data.num_images != 1 and built_in and data.task != "counting":
        problems.append(f"data.num_images {data.num_images} does nothing with data.task {data.task}; leave it out")
    if data.min_pixels is not None and data.max_pixels is not None and data.min_pixels > data.max_pixels:
        problems.append(f"data.min_pixels {data.min_pixels} is above data.max_pixels {data.max_pixels}")
    if data.overlong == "drop" and data.max_prompt_tokens is None:
        problems.append("data.overlong drop does nothing without data.max_prompt_tokens")
    if config.run.eval_steps > 0 and data.eval_split is None:
        problems.append(f"run.eval_steps {config.run.eval_steps} does nothing without data.eval_split")
    for option, steps in (("trace_steps", config.run.trace_steps), ("memory_steps", config.run.memory_steps)):
        outside = [step for step in steps if not 1 <= step <= config.train.max_steps]
        if outside:
            problems.append(
                f"run.{option} {outside} are not steps of this run, which are 1 to train.max_steps "
                f"{config.train.max_steps}"
            )
    weights, functions = rewards.reward_weights, rewards.reward_funcs
    if weights is not None and functions and len(weights) != len(functions):
        problems.append(
            f"rewards.reward_weights has {len(weights)} entries for {len(functions)} rewards.reward_funcs; needed one "
            "for each"
        )
    return problems
