"""Losses, gradients, metrics, advantages, corrections and reward calls against TRL 1.16.0's own code, in float64.

`trl_object` makes an uninitialised TRL trainer that carries just the attributes its methods read; the methods that run
are those of the installed package. Only generation and the model's forward pass are answered by given tensors.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")

from trl import GRPOTrainer, RLOOTrainer  # noqa: E402

from rollplex.config import RewardConfig  # noqa: E402
from rollplex.config_algorithm import AlgorithmConfig  # noqa: E402
from rollplex.tasks.rewards import RewardRunner, TrainerState  # noqa: E402
from rollplex.train.advantage import compute_advantages, estimator_of, reward_metrics  # noqa: E402
from rollplex.train.correction import mismatch_correction  # noqa: E402
from rollplex.train.kl import response_kl  # noqa: E402
from rollplex.train.loss import LossBatch, LossSettings, LossTotals, policy_loss  # noqa: E402
from rollplex.train.metric_sums import merge_metrics  # noqa: E402
from rollplex.types import Example, FinishReason, Group, Response  # noqa: E402

TOLERANCE = 1e-12
MAX_LENGTH = 11
EOS, PAD = 2, 0


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class OneProcess:
    """What TRL reads of accelerate's Accelerator, for one process."""

    num_processes, process_index, is_main_process, sync_gradients = 1, 0, True, True
    device = torch.device("cpu")

    def gather(self, value: Any) -> Any:
        return value

    def reduce(self, value: Any, reduction: str) -> Any:
        return value


def trl_object(cls: type, **attributes: Any) -> Any:
    """An uninitialised TRL trainer with the defaults of its configuration for what these tests leave open."""
    trainer = object.__new__(cls)
    args = dict(
        use_bias_correction_kl=True, delta=None, steps_per_generation=1, gradient_accumulation_steps=1,
        per_device_train_batch_size=4, gradient_checkpointing_kwargs=None, report_to=[],
    )  # fmt: skip
    args |= attributes.pop("args", {})
    defaults = dict(
        args=SimpleNamespace(**args), accelerator=OneProcess(), num_iterations=1,
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False), state=SimpleNamespace(global_step=3),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, _entropy_bonus_enabled=False,
        importance_sampling_level="token", beta=0.0, epsilon_low=0.2, epsilon_high=0.2, use_vllm=False,
        vllm_importance_sampling_correction=False, current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH, _metrics={"train": defaultdict(list)}, _logs=defaultdict(list),
        environment_factories=None, environments=None, tools=None, pad_to_multiple_of=None,
        _tokenizer=SimpleNamespace(pad_token_id=PAD), eos_token_ids=[EOS], mask_truncated_completions=False,
        ref_model=object(), multi_objective_aggregation="sum_then_normalize", log_multimodal=False,
        scale_rewards="group", reward_clip_range=None, normalize_advantages=False,
        _pending_extra_logs=defaultdict(list), _pending_metrics=defaultdict(list),
    )  # fmt: skip
    for name, value in {**defaults, **attributes}.items():
        setattr(trainer, name, value)
    trainer._logs["rewards"], trainer._logs["extra"] = defaultdict(list), defaultdict(list)
    return trainer


class Tensors:
    """Random ragged responses, padded as TRL wants them and packed as we do; some rows are left out."""

    def __init__(self, seed: int, lengths: tuple[int, ...], left_out: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows, width = len(lengths), max(lengths)

        def draw() -> torch.Tensor:
            return torch.randn(rows, width, generator=generator, dtype=torch.float64)

        self.lengths = lengths
        self.exists = torch.arange(width) < torch.tensor(lengths)[:, None]
        self.counts_N = torch.tensor([i not in left_out for i in range(rows)])
        self.mask = (self.exists & self.counts_N[:, None]).long()
        self.logp = -draw().abs() - 0.3
        self.old = self.logp + 0.25 * draw()
        self.ref = self.logp + 0.4 * draw()
        self.sampled = self.old + 0.5 * draw()
        self.entropy = draw().abs()
        self.advantage = torch.randn(rows, generator=generator, dtype=torch.float64)
        self.row_T = torch.arange(rows)[:, None].expand(rows, width)[self.exists]

    def packed(self, padded: torch.Tensor) -> torch.Tensor:
        return padded[self.exists]

    def inputs(self) -> dict[str, Any]:
        rows = len(self.lengths)
        return dict(
            prompt_ids=torch.ones(rows, 2, dtype=torch.long), prompt_mask=torch.ones(rows, 2, dtype=torch.long),
            completion_ids=torch.ones_like(self.mask), completion_mask=self.mask, advantages=self.advantage,
            old_per_token_logps=self.old, ref_per_token_logps=self.ref, num_items_in_batch=self.mask.sum(),
        )  # fmt: skip


SHAPES = {
    "ragged": Tensors(0, (5, 1, 7, 3, 11, 2)),
    "left_out_rows": Tensors(1, (4, 6, 1, 1, 9, 3), left_out=(1, 3)),
    "all_one_token": Tensors(2, (1, 1, 1, 1)),
    "one_response": Tensors(3, (6,)),
}


def algorithm(loss_type: str, **options: Any) -> AlgorithmConfig:
    if loss_type == "cispo":
        options.setdefault("epsilon_high", 1.1)
    return AlgorithmConfig(loss_type=loss_type, **options)  # type: ignore[arg-type]


def ours(
    data: Tensors, config: AlgorithmConfig, weight_T: torch.Tensor | None = None, old: bool = True
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Loss, gradient (packed) and metrics."""
    logp_T = data.packed(data.logp).clone().requires_grad_()
    totals = LossTotals.of_step(data.lengths, data.counts_N.tolist())
    batch = LossBatch(
        logp_T=logp_T, old_logp_T=data.packed(data.old) if old else None,
        ref_logp_T=data.packed(data.ref) if config.beta else None, advantage_N=data.advantage, row_T=data.row_T,
        counts_N=data.counts_N, weight_T=weight_T, entropy_T=data.packed(data.entropy),
    )  # fmt: skip
    loss, metrics = policy_loss(batch, totals, LossSettings.from_config(config, MAX_LENGTH))
    loss.backward()
    assert logp_T.grad is not None
    return loss.detach(), logp_T.grad, metrics.values()


def trl_trainer(config: AlgorithmConfig, logp: torch.Tensor, entropy: torch.Tensor, **more: Any) -> Any:
    """A trainer whose forward pass answers `logp` and `entropy`."""
    args = {"delta": config.delta, "use_bias_correction_kl": config.use_bias_correction_kl, **more.pop("args", {})}
    return trl_object(
        GRPOTrainer,
        loss_type="grpo" if config.loss_type == "gspo" else config.loss_type,
        importance_sampling_level="sequence" if config.loss_type == "gspo" else config.importance_sampling_level,
        beta=config.beta, epsilon_low=config.epsilon,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high, args=args,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None), **more,
    )  # fmt: skip


def theirs(
    data: Tensors, config: AlgorithmConfig, inputs: dict[str, Any] | None = None, **attributes: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """The same from TRL's `_compute_loss`, gradient padded."""
    logp = data.logp.clone().requires_grad_()
    trainer = trl_trainer(config, logp, data.entropy, **attributes)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs or data.inputs())
    loss.backward()
    assert logp.grad is not None
    return loss.detach(), logp.grad, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def assert_equal(
    data: Tensors, mine: tuple[Any, Any, dict[str, float]], other: tuple[Any, Any, dict[str, float]]
) -> None:
    assert abs(mine[0] - other[0]) <= TOLERANCE * max(1.0, float(abs(other[0])))
    torch.testing.assert_close(mine[1], data.packed(other[1]), rtol=TOLERANCE, atol=TOLERANCE)
    assert not other[1][~data.exists].any()
    assert other[1].abs().max() > 1e-4  # the comparison is not of zeros


def assert_metrics(mine: dict[str, float], other: dict[str, float], tolerance: float = 1e-6) -> None:
    """TRL computes flags in float32, hence the wider tolerance. All keys that TRL logs must be there."""
    assert set(other) <= set(mine)
    for name, value in other.items():
        assert mine[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(  # cispo with delta is refused: TRL ignores it there
    ("loss_type", "delta"), [(n, d) for n in LOSSES for d in (None, 1.2, 1.3) if n != "cispo" or d is None]
)
def test_loss_gradient_and_metrics(loss_type: str, delta: float | None, beta: float, shape: str) -> None:
    data, config = SHAPES[shape], algorithm(loss_type, beta=beta, delta=delta)
    mine, other = ours(data, config), theirs(data, config)
    assert_equal(data, mine, other)
    # TRL counts left-out responses in sequence-level clip ratios, and a one-token padded batch as sequence level.
    if data.counts_N.all() and max(data.lengths) > 1:
        assert_metrics(mine[2], other[2])


@pytest.mark.parametrize("shape", ["ragged", "left_out_rows"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
def test_sequence_level_ratio_with_every_reduction(loss_type: str, shape: str) -> None:
    data = SHAPES[shape]
    config = algorithm(loss_type, beta=0.04, importance_sampling_level="sequence", epsilon_high=1.05)
    assert_equal(data, ours(data, config), theirs(data, config))


@pytest.mark.parametrize("loss_type", LOSSES)
def test_asymmetric_clip_really_clips(loss_type: str) -> None:
    options = {"epsilon": 0.01} if loss_type == "cispo" else {"epsilon": 0.01, "epsilon_high": 0.03}
    data, config = SHAPES["ragged"], algorithm(loss_type, **options)
    mine, other = ours(data, config), theirs(data, config)
    assert_equal(data, mine, other)
    assert_metrics(mine[2], other[2])
    keys = ["cispo_clip_ratio"] if loss_type == "cispo" else ["clip_ratio/low_mean", "clip_ratio/high_mean"]
    assert all(0 < mine[2][key] < 1 for key in keys)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_on_policy_without_old_logps(loss_type: str) -> None:
    """TRL drops old_per_token_logps when generation and update are aligned; so do we (old_logp_T None)."""
    data, config = SHAPES["left_out_rows"], algorithm(loss_type, beta=0.04)
    inputs = data.inputs()
    del inputs["old_per_token_logps"]
    assert_equal(data, ours(data, config, old=False), theirs(data, config, inputs))


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_kl_without_the_ratio(loss_type: str, old: bool) -> None:
    """use_bias_correction_kl off, off-policy and strictly on-policy, where the ratio is 1 and yet has a gradient."""
    data, config = SHAPES["left_out_rows"], algorithm(loss_type, beta=0.04, use_bias_correction_kl=False)
    inputs = data.inputs()
    if not old:
        del inputs["old_per_token_logps"]
    mine = ours(data, config, old=old)
    assert_equal(data, mine, theirs(data, config, inputs))
    weighted = ours(data, algorithm(loss_type, beta=0.04), old=old)
    assert (mine[1] - weighted[1]).abs().max() > 1e-4
    assert old or mine[0] == weighted[0]


def test_token_level_metrics_with_left_out_rows() -> None:
    data, config = SHAPES["left_out_rows"], algorithm("dapo", beta=0.04, epsilon=0.05)
    assert_metrics(ours(data, config)[2], theirs(data, config)[2])


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "cispo", "gspo"])
def test_accumulated_micro_batches(loss_type: str) -> None:
    """TRL's losses over 2 micro-batches of 2 optimizer steps per rollout, summed, against our shares of one step."""
    data, config = SHAPES["ragged"], algorithm(loss_type, beta=0.04)
    settings = LossSettings.from_config(config, MAX_LENGTH)
    rollout_tokens = int(data.mask.sum()) * 2 + 5  # the other step's tokens differ
    halves = [slice(0, 3), slice(3, 6)]
    sum_theirs, parts = torch.zeros(()), []
    for half in halves:
        inputs = {k: v[half] if v.dim() else v for k, v in data.inputs().items()}
        inputs["num_items_in_batch"] = torch.tensor(rollout_tokens)
        trainer = trl_trainer(
            config, data.logp[half], data.entropy[half], current_gradient_accumulation_steps=2,
            args={"steps_per_generation": 4},
        )  # fmt: skip
        sum_theirs += GRPOTrainer._compute_loss(trainer, None, inputs)
    totals = LossTotals.of_step(
        data.lengths, data.counts_N.tolist(), rollout_tokens=rollout_tokens, steps_per_generation=2
    )
    for half in halves:
        tokens = (data.row_T >= half.start) & (data.row_T < half.stop)
        batch = LossBatch(
            data.packed(data.logp)[tokens], data.packed(data.old)[tokens], data.packed(data.ref)[tokens],
            data.advantage[half], data.row_T[tokens] - half.start, data.counts_N[half],
        )  # fmt: skip
        parts.append(policy_loss(batch, totals, settings))
    assert sum(part.loss for part in parts) == pytest.approx(float(sum_theirs), rel=TOLERANCE)
    assert merge_metrics(part.metrics for part in parts).values()["loss"] == pytest.approx(float(sum_theirs))


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@pytest.mark.parametrize("loss_type", ["dapo", "gspo", "cispo", "grpo"])
@pytest.mark.parametrize("mode", MODES)
def test_mismatch_correction_in_the_loss(mode: Any, loss_type: str) -> None:
    data = SHAPES["ragged"]
    config = algorithm(loss_type, beta=0.04, mismatch_correction=mode, mismatch_clip_max=1.3)
    rollout = trl_rollout(data, [[0.0, 1.0, 2.0], [1.0, 0.5, 4.0]], mode=mode, clip_max=1.3)
    correction = mismatch_correction(
        data.packed(data.old), data.packed(data.sampled), data.row_T, data.counts_N, mode=mode, clip_max=1.3
    )
    inputs = {**data.inputs(), "importance_sampling_ratio": rollout.output["importance_sampling_ratio"]}
    other = theirs(data, config, inputs, use_vllm=True, vllm_importance_sampling_correction=True)
    mine = ours(data, config, correction.weight_T)
    assert_equal(data, mine, other)
    assert abs(mine[0] - ours(data, config)[0]) > 1e-3  # the correction did something
    metrics = correction.stats.metrics()
    theirs_logged = {name: value for name, value in rollout.metrics.items() if name.startswith("sampling/")}
    assert len(theirs_logged) == 5
    assert_metrics(metrics, theirs_logged, TOLERANCE)
    cut = metrics["sampling/truncated_fraction"] + metrics["sampling/masked_fraction"]
    assert 0 < cut < 1 and metrics["sampling/raw_ratio/max"] > 1.3


def test_missing_sampling_logps_as_trl() -> None:
    data = Tensors(5, (4, 3, 6, 2))
    data.sampled[0, 1] = data.sampled[2, 0] = torch.nan
    rollout = trl_rollout(data, [[0.0, 1.0], [1.0, 0.5]], mode="token_truncate", clip_max=1.2)
    mine = mismatch_correction(
        data.packed(data.old), data.packed(data.sampled), data.row_T, data.counts_N,
        mode="token_truncate", clip_max=1.2,
    )  # fmt: skip
    assert mine.weight_T is not None
    torch.testing.assert_close(mine.weight_T, data.packed(rollout.output["importance_sampling_ratio"]))
    assert_metrics(
        mine.stats.metrics(), {k: v for k, v in rollout.metrics.items() if k.startswith("sampling/")}, TOLERANCE
    )


def trl_rollout(
    data: Tensors,
    rewards: list[list[float | None]] | list[list[list[float | None]]],
    *,
    cls: type = GRPOTrainer,
    mode: str | None = None,
    clip_max: float = 3.0,
    weights: tuple[float, ...] = (1.0,),
    **attributes: Any,
) -> SimpleNamespace:
    """TRL's own `_generate_and_score_completions` on given responses, rewards and log-probs: its output and metrics.

    rewards: per group, per response; with several functions per response, a list per function innermost.
    """
    per_func = torch.tensor(
        [
            [torch.nan if r is None else r for r in (row if isinstance(row, list) else [row])]
            for group in rewards
            for row in group
        ]
    )
    # A response of every length; rows that are left out end without EOS.
    ids = [[7] * (n - 1) + [EOS if kept else 7] for n, kept in zip(data.lengths, data.counts_N.tolist(), strict=True)]
    sampled = [data.sampled[i, :n].tolist() for i, n in enumerate(data.lengths)] if mode else None
    count, size = len(ids), len(rewards[0])
    passes = itertools.chain([data.old] if mode or cls is RLOOTrainer else [], itertools.repeat(data.ref))

    def generate(prompts: Any) -> tuple[Any, ...]:
        texts, prompt_ids = ["x"] * count, [[1]] * count
        if cls is RLOOTrainer:
            return prompt_ids, ids, texts
        return prompt_ids, ids, None, texts, sampled, {}, None, []

    trainer = trl_object(
        cls, _generate=generate, _calculate_rewards=lambda *_: per_func, num_generations=size,
        reward_weights=torch.tensor(weights), reward_func_names=[f"f{i}" for i in range(per_func.shape[1])],
        use_vllm=mode is not None, vllm_importance_sampling_correction=mode is not None,
        vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=clip_max,
        vllm_importance_sampling_clip_min=None, mask_truncated_completions=True,
        _get_per_token_logps_and_entropies=lambda *_, **__: (next(passes), None, None), **attributes,
    )  # fmt: skip
    output = cls._generate_and_score_completions(trainer, [{"prompt": "p"}] * count)  # type: ignore[attr-defined]
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return SimpleNamespace(output=output, metrics=metrics)


REWARDS: dict[str, list[list[float | None]]] = {
    "spread": [[0.0, 1.0, 0.25], [3.0, 3.5, -1.0]],
    "one_group_equal": [[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]],
    "all_equal": [[0.1, 0.1, 0.1], [0.1, 0.1, 0.1]],
    "some_none": [[None, 1.0, 3.0], [0.5, None, None]],
    "a_group_of_none": [[None, None, None], [1.0, 2.0, None]],
    "groups_of_one": [[1.0], [2.0], [4.0]],
}


def check_reward_metrics(rewards: list[list[float | None]], advantages: Any, theirs: dict[str, float]) -> None:
    mine = reward_metrics(rewards, [{"f0": group} for group in rewards], advantages)
    wanted = {k: v for k, v in theirs.items() if k.startswith("reward") or k.startswith("frac")}
    assert len(wanted) == 5
    for name, value in wanted.items():
        if value != value:  # TRL logs NaN for what is undefined, we leave it out
            assert name not in mine
        else:
            assert mine[name] == pytest.approx(value, rel=TOLERANCE, abs=1e-9), name


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("case", REWARDS)
def test_group_relative_advantages_and_reward_metrics(case: str, scale: Any) -> None:
    rewards = REWARDS[case]
    data = Tensors(4, (3, 1, 4, 2, 2, 5)[: sum(map(len, rewards))])
    rollout = trl_rollout(data, rewards, scale_rewards=scale)
    mine = compute_advantages(rewards, estimator=estimator_of("dapo"), scale_rewards=scale)
    flat = [value for group in mine.values for value in group]
    # TRL's rounding in (r - mean) of equal rewards is divided by 1e-4; ours is exactly 0 there.
    assert flat == pytest.approx(rollout.output["advantages"].tolist(), rel=TOLERANCE, abs=TOLERANCE)
    check_reward_metrics(rewards, mine, rollout.metrics)


def test_several_weighted_reward_functions() -> None:
    parts: dict[str, list[list[float | None]]] = {
        "f0": [[1.0, None, None], [0.5, 2.0, 3.0]],
        "f1": [[None, 4.0, None], [1.0, None, 0.25]],
    }
    weights = (0.5, -2.0)
    per_function = [
        [list(scores) for scores in zip(a, b, strict=True)] for a, b in zip(parts["f0"], parts["f1"], strict=True)
    ]
    rollout = trl_rollout(Tensors(4, (3, 1, 4, 2, 2, 5)), per_function, weights=weights)

    def f0(turn: list[int], **_: Any) -> list[float | None]:
        return parts["f0"][turn[0]]

    def f1(turn: list[int], **_: Any) -> list[float | None]:
        return parts["f1"][turn[0]]

    runner = RewardRunner(RewardConfig(reward_weights=weights), [f0, f1])
    responses = tuple(Response(i, (1,), (0.0,), FinishReason.STOP) for i in range(3))
    groups = [Group(i, Example(i, "p", columns={"turn": i}), None, responses, 0) for i in (0, 1)]  # type: ignore[arg-type]
    pending = [runner.submit(group, ["x"] * 3, TrainerState(0, 1)) for group in groups]
    scores = [p.result(timeout_s=120) for p in pending]
    runner.close()
    rewards = [list(s.rewards) for s in scores]
    mine = compute_advantages(rewards, estimator="group")
    flat = [value for group in mine.values for value in group]
    assert flat == pytest.approx(rollout.output["advantages"].tolist(), rel=TOLERANCE, abs=TOLERANCE)
    logged = reward_metrics(rewards, [s.parts for s in scores], mine)
    wanted = {k: v for k, v in rollout.metrics.items() if "reward" in k}
    assert len(wanted) == 7 and logged == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("case", REWARDS)
def test_rloo_advantages_with_kl_in_reward(case: str, beta: float) -> None:
    rewards = REWARDS[case]
    data = Tensors(6, (3, 1, 4, 2, 2, 5)[: sum(map(len, rewards))])
    rollout = trl_rollout(data, rewards, cls=RLOOTrainer, beta=beta)
    kl = None
    if beta:
        old, ref = (data.packed(part).split(list(data.lengths)) for part in (data.old, data.ref))
        flat_kl = response_kl(old, ref, "k1")
        kl = torch.tensor(flat_kl, dtype=torch.float64).view(len(rewards), -1).tolist()
    mine = compute_advantages(rewards, estimator=estimator_of("rloo"), beta=beta, kl=kl)
    flat = [value for group in mine.values for value in group]
    assert flat == pytest.approx(rollout.output["advantages"].tolist(), rel=TOLERANCE, abs=TOLERANCE)
    check_reward_metrics(rewards, mine, rollout.metrics)


@pytest.mark.parametrize("shape", SHAPES)
def test_rloo_loss_gradient_and_metrics(shape: str) -> None:
    data, config = SHAPES[shape], algorithm("rloo", epsilon=0.15)
    logp = data.logp.clone().requires_grad_()
    trainer = trl_object(
        RLOOTrainer, epsilon_low=0.15, epsilon_high=0.15,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, data.entropy, None),
    )  # fmt: skip
    inputs = {**data.inputs(), "old_logps": (data.old * data.mask).sum(1)}
    loss = RLOOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logp.grad is not None
    # A left-out response is a constant, -advantage, in TRL's mean: no gradient; ours leaves it out.
    constant = -data.advantage[~data.counts_N].sum() / len(data.lengths)
    mine = ours(data, config)
    assert_equal(data, mine, (loss.detach() - constant, logp.grad, {}))
    if data.counts_N.all():
        assert_metrics(mine[2], {name: values[-1] for name, values in trainer._metrics["train"].items()})


@pytest.mark.parametrize("chat", [True, False])
def test_reward_functions_get_the_same_keywords_as_from_trl(chat: bool) -> None:
    """The same row through TRL's `_calculate_rewards` and through the runner; media keywords are ours in addition."""
    prompt: Any = [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}] if chat else "How many?"
    texts, ids, columns = ["three", "4"], [[5, EOS], [6]], {"answer": "3", "level": 2}
    completions: Any = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
    seen: list[dict[str, Any]] = []

    def plain(**keywords: Any) -> list[float | None]:
        seen.append(keywords)
        keywords["log_extra"]("shown", keywords["completion_ids"])
        keywords["log_metric"]("mean_level", 2.0)
        return [1.0, None]

    async def judge(**keywords: Any) -> list[float | None]:
        return [None, None]

    names = {"reward_funcs": [plain], "reward_processing_classes": [None], "reward_func_names": ["plain"]}
    trainer = trl_object(GRPOTrainer, **names)
    rows = [{"prompt": prompt, **columns} for _ in texts]
    wanted = GRPOTrainer._calculate_rewards(trainer, rows, [prompt] * 2, completions, ids)
    group = Group(
        0, Example(0, prompt, columns=columns), None,  # type: ignore[arg-type]
        tuple(Response(i, tuple(t), (0.0,) * len(t), FinishReason.STOP) for i, t in enumerate(ids)), 0,
    )  # fmt: skip
    runner = RewardRunner(RewardConfig(), [plain, judge])
    scores = runner.submit(group, texts, TrainerState(3, 9)).result(timeout_s=120)
    runner.close()
    from_trl, from_us = seen
    assert set(from_us) - set(from_trl) == {"images", "videos"} and set(from_trl) <= set(from_us)
    for key in set(from_trl) - {"trainer_state", "log_extra", "log_metric"}:
        assert from_us[key] == from_trl[key], key
    assert from_us["trainer_state"].global_step == from_trl["trainer_state"].global_step == 3
    rewards = [None if r != r else r for r in wanted[:, 0].tolist()]
    assert list(scores.parts["plain"]) == rewards == [1.0, None] and scores.rewards == (1.0, None)
    assert scores.extras["shown"] == tuple(trainer._pending_extra_logs["shown"])
    assert list(scores.metrics["mean_level"]) == trainer._pending_metrics["mean_level"]


def test_runs_against_the_stated_version() -> None:
    assert trl.__version__ == "1.16.0"
