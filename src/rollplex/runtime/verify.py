"""`rollplex verify`: is training on shared prefixes exact on this model and these rows?

Takes the recipe's model and its first rows, samples responses with the recipe's own engine settings, cuts them to
ragged lengths (1 token included, one whole group of 1 token), and computes one optimizer step's log-probs and gradient
twice: on shared prefixes in each of the three activation modes, and by the ordinary full-sequence path. The loss is the
recipe's own (`algorithm.*`, ratio 1 as in any first step of a rollout) with keyed random advantages, so that a model
whose rewards are all equal still has a gradient. With `algorithm.beta` > 0 the reference is part of both paths; its
log-probs are then shifted by keyed noise, since the KL to an equal reference has no gradient. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch

from rollplex.config import Config
from rollplex.errors import ConfigError, OverlongPromptError
from rollplex.models.precision import full_float64
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.local_engine import LocalEngine
from rollplex.runtime.session import Session, build_session
from rollplex.train.optimizer import OptimizerStep, PolicyOptimizer
from rollplex.train.prefix_book import PrefixBook
from rollplex.train.reference import Reference
from rollplex.train.update import FrozenLogps, Logps, Updater
from rollplex.types import Example, FinishReason, Group, PromptSpec, Response, ScoredGroup

Mode = Literal["graph", "checkpoint", "recompute"]

MIN_ROWS = 8  # rows compared when the recipe has them, though a step takes fewer
MAX_RESPONSE_TOKENS = 64  # longer responses add time, not kinds of computation
REFERENCE_NOISE = 0.1  # nats

# (relative gradient error, absolute log-prob error). float64 and float32 are the product's contract; bfloat16 is twice
# the largest error measured on six layers with wide weights, where either path is as far from float64 as from the other
# (docs/numerics.md).
BOUNDS: dict[str, tuple[float, float]] = {
    "float64": (1e-12, 1e-10),
    "float32": (1e-5, 1e-4),
    "bfloat16": (6e-2, 1.5e-1),
}


@dataclass(frozen=True, slots=True)
class RowReport:
    """One prompt of the comparison."""

    row: int
    prompt_tokens: int
    visual_tokens: int
    response_tokens: tuple[int, ...]
    max_abs_logp_error: float  # nats


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Errors of the shared-prefix path against the full-sequence path.

    The relative gradient error is ||split - full|| / ||full||, L2 over the whole vector of trainable parameters, the
    largest of the three activation modes. `passed`: every error is within its bound.
    """

    max_rel_grad_error: float
    max_abs_logp_error: float  # nats; policy, and reference where the recipe has one
    dtype: str
    passed: bool
    grad_bound: float
    logp_bound: float
    max_abs_engine_logp_error: float  # log-probs that sampling reported, against the full-sequence path; logp_bound
    grad_norm: float  # of the full-sequence path
    grad_errors: dict[str, float]  # by activation mode
    worst_tensor: str  # the parameter with the largest error relative to its own gradient
    worst_tensor_rel_error: float
    rows: tuple[RowReport, ...]

    @property
    def verdict(self) -> str:
        """In a sentence."""
        if self.passed:
            return "exact within the bounds"
        if self.dtype == "bfloat16":
            return (
                "NOT within the bounds; 16 bits round more the deeper a model is: model.dtype=float32 tells rounding "
                "from a fault"
            )
        return "NOT within the bounds"


class _GradientProbe(PolicyOptimizer):
    """Hands out each step's gradient instead of applying it."""

    taken: dict[str, torch.Tensor]

    def step(self) -> OptimizerStep:
        self.taken = {name: m.grad.clone() for name, m in self.masters.items() if m.grad is not None}
        self.drop_gradients()
        return OptimizerStep(0.0, 0.0)


class _Errors(NamedTuple):
    """Of one gradient against another."""

    whole: float
    norm: float
    worst: str
    worst_error: float


def verify(config: Config) -> VerifyReport:
    """Compare both paths on the recipe's model and rows. Raises what loading and row preparation raise."""
    with full_float64() if config.model.dtype == "float64" else nullcontext():
        session = build_session(config)
        scored = _sampled_groups(session)
        return _compare(session, scored)


def _compare(session: Session, scored: Sequence[ScoredGroup]) -> VerifyReport:
    config, policy = session.config, session.policy
    groups = [item.group for item in scored]
    probe = _GradientProbe(policy.model, config.train, 1)
    reference = Reference(policy) if config.algorithm.beta > 0 else None
    full = Updater(policy, probe, reference, _one_step(config, share_prefix=False))
    full_logps = full.old_logps(groups, None)
    full_ref = full.reference_logps(groups) if reference is not None else None
    frozen = FrozenLogps(None, None if full_ref is None else _shifted(full_ref, config.run.seed))
    full.update(scored, None, frozen)
    wanted = probe.taken
    errors: dict[str, _Errors] = {}
    by_row = {group.rollout_id: 0.0 for group in groups}
    for mode in get_args(Mode):
        split = Updater(policy, probe, reference, _one_step(config, share_prefix=True, mode=mode))
        book = PrefixBook(policy, config.train.micro_batch_tokens)
        book.compute({group.rollout_id: group.spec for group in groups}, mode)
        _raise_to(by_row, split.old_logps(groups, book), full_logps)
        if full_ref is not None:
            _raise_to(by_row, split.reference_logps(groups), full_ref)
        split.update(scored, book, frozen)
        errors[mode] = _errors(probe.taken, wanted)
    engine = _max(
        _largest(torch.tensor(response.logps, dtype=torch.float64), full_logps[group.rollout_id][response.index])
        for group in groups
        for response in group.responses
    )
    return _report(config.model.dtype, groups, errors, by_row, engine)


def _report(
    dtype: str, groups: Sequence[Group], errors: dict[str, _Errors], by_row: dict[int, float], engine: float
) -> VerifyReport:
    grad_bound, logp_bound = BOUNDS[dtype]
    grad_error = _max(e.whole for e in errors.values())
    logp_error = _max(by_row.values())
    worst = max(errors.values(), key=lambda e: e.worst_error)
    return VerifyReport(
        max_rel_grad_error=grad_error,
        max_abs_logp_error=logp_error,
        dtype=dtype,
        # written so that NaN does not pass
        passed=grad_error <= grad_bound and logp_error <= logp_bound and engine <= logp_bound,
        grad_bound=grad_bound,
        logp_bound=logp_bound,
        max_abs_engine_logp_error=engine,
        grad_norm=worst.norm,
        grad_errors={mode: e.whole for mode, e in errors.items()},
        worst_tensor=worst.worst,
        worst_tensor_rel_error=worst.worst_error,
        rows=tuple(
            RowReport(
                group.spec.row,
                group.spec.num_tokens,
                int((group.spec.token_types > 0).sum()),
                tuple(len(response.token_ids) for response in group.responses),
                by_row[group.rollout_id],
            )
            for group in groups
        ),
    )


def _one_step(config: Config, *, share_prefix: bool, mode: Mode = "graph") -> Config:
    """The recipe as one optimizer step by one of the two paths. Mismatch with the engine is corrected where the recipe
    asks for it, not because it names vLLM: the weights of each path would differ by its own log-probs' rounding."""
    algorithm = config.algorithm
    one = {"num_iterations": 1, "steps_per_generation": 1}
    algorithm = algorithm.model_copy(update=one | {"mismatch_correction": algorithm.mismatch_correction or "off"})
    train = config.train.model_copy(update={"share_prefix": share_prefix, "prefix_activations": mode})
    return config.model_copy(update={"algorithm": algorithm, "train": train})


def _sampled_groups(session: Session) -> list[ScoredGroup]:
    """The first rows with responses of ragged lengths and keyed advantages."""
    config, policy = session.config, session.policy
    examples = _first_rows(session)
    params = SamplingParams.from_config(
        config, stop_token_ids=session.stop_token_ids, banned_token_ids=policy.adapter.vision_token_ids
    )
    params = replace(params, max_tokens=min(params.max_tokens, MAX_RESPONSE_TOKENS))
    engine = LocalEngine(policy, params, max_rows=config.rollout.max_decode_rows)
    for number, (_, spec) in enumerate(examples):
        engine.admit(number, spec)
    found: dict[tuple[int, int], Response] = {}
    while engine.busy:
        for finished in engine.step():
            found[finished.rollout_id, finished.response.index] = finished.response
    rng = np.random.default_rng((config.run.seed, 0))
    scored = []
    for number, (example, spec) in enumerate(examples):
        responses = []
        for index in range(params.num_generations):
            short = (index == 0 and params.num_generations > 1) or (number == len(examples) - 1 and number > 0)
            response = found[number, index]
            length = 1 if short else int(rng.integers(1, len(response.token_ids) + 1))
            # STOP, so that mask_truncated_completions leaves none out
            cut = replace(response, token_ids=response.token_ids[:length], logps=response.logps[:length])
            responses.append(replace(cut, finish=FinishReason.STOP))
        advantages = tuple(float(a) for a in rng.normal(size=len(responses)))
        group = Group(number, example, spec, tuple(responses), policy.weight_version)
        scored.append(ScoredGroup(group, (None,) * len(responses), {}, advantages))
    return scored


def _first_rows(session: Session) -> list[tuple[Example, PromptSpec]]:
    """(example, prompt) of the first rows; prompts over the limit are left out where the recipe drops them."""
    config = session.config
    count = min(len(session.task), max(config.rollout.prompts_per_step, MIN_ROWS))
    rows: list[tuple[Example, PromptSpec]] = []
    for index in range(len(session.task)):
        if len(rows) == count:
            break
        example = session.task.example(index)
        try:
            rows.append((example, session.prompts.build(example)))
        except OverlongPromptError:
            if config.data.overlong == "error":
                raise
    if not rows:
        raise ConfigError("no row is within data.max_prompt_tokens, so there is nothing to verify; raise it")
    return rows


def _shifted(logps: Logps, seed: int) -> Logps:
    """A reference that differs from the policy: log-probs plus keyed noise."""
    noise = torch.Generator().manual_seed(seed)
    return {
        rollout_id: tuple(
            part + REFERENCE_NOISE * torch.randn(part.shape, generator=noise, dtype=part.dtype).to(part.device)
            for part in parts
        )
        for rollout_id, parts in logps.items()
    }


def _raise_to(by_row: dict[int, float], found: Logps, wanted: Logps) -> None:
    """Raise each row's error to that of these log-probs."""
    for rollout_id in by_row:
        pairs = zip(found[rollout_id], wanted[rollout_id], strict=True)
        by_row[rollout_id] = _max([by_row[rollout_id], *(_largest(a, b) for a, b in pairs)])


def _largest(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double().to(wanted.device) - wanted.double()).abs().max())


def _max(values: Iterable[float]) -> float:
    """Maximum in which NaN wins."""
    return float(np.max(list(values)))


def _errors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> _Errors:
    """A tensor that one side lacks counts as zeros there."""
    wrong = norm = worst_error = 0.0
    worst = ""
    for name in sorted(found.keys() | wanted.keys()):
        a, b = found.get(name), wanted.get(name)
        like = a if b is None else b
        assert like is not None  # the name is one side's
        a_wide = torch.zeros_like(like, dtype=torch.float64) if a is None else a.double()
        b_wide = torch.zeros_like(like, dtype=torch.float64) if b is None else b.double()
        difference, size = float((a_wide - b_wide).norm()), float(b_wide.norm())
        wrong, norm = wrong + difference**2, norm + size**2
        if size > 0 and difference / size > worst_error:
            worst, worst_error = name, difference / size
    if norm == 0.0:
        return _Errors(0.0 if wrong == 0.0 else float("inf"), 0.0, worst, worst_error)
    return _Errors((wrong / norm) ** 0.5, norm**0.5, worst, worst_error)
