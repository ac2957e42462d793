"""Which engine samples a run's responses (rollout.engine), built once and opened for each rollout."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from rollplex.config import Config
from rollplex.models.policy import Policy
from rollplex.models.save import save_without_weights
from rollplex.rollout.decode_graphs import DecodeGraphs, decode_graphs
from rollplex.rollout.engine import NothingToPublish, RolloutEngine, SamplingParams
from rollplex.rollout.hosted_engine import HostedEngine, HostedRollout
from rollplex.rollout.hosting import Host, HostSettings
from rollplex.rollout.local_engine import LocalEngine, PrefixSource
from rollplex.rollout.server import ServerHost
from rollplex.rollout.vllm_engine import VllmHost, require_vllm
from rollplex.weights.loan import LentWeights

_log = logging.getLogger(__name__)


class Engines(Protocol):
    """Where rollouts come from. `open` before each one: it may have to push weights first.

    reads_prefixes: whether its engines decode on the prefixes of `prefix_source`; others compute prompts themselves.
    """

    reads_prefixes: bool

    def open(self, params: SamplingParams, prefix_source: PrefixSource | None = None) -> RolloutEngine:
        """An engine under the policy's present weights. Prefixes of `prefix_source` are used where that is possible."""

    def begin_publish(self) -> None:
        """New weights are there, and stand still until the next rollout: bring them to the engines beside other work,
        where that gains. `open` waits for its end and raises what it did."""

    def writing(self, who: str) -> AbstractContextManager[None]:
        """Block in which `who` changes the policy's weights. Raises StateError while an engine reads them."""

    def metrics(self) -> dict[str, float]:
        """Of the newest publish."""

    def sleep(self) -> None:
        """No rollout for a while: give memory back. `open` wakes."""

    def close(self) -> None:
        """End what was started."""


class LocalEngines(NothingToPublish):
    """The engine on the training weights themselves: nothing to push. `graphs` outlive each rollout; without, nothing
    is kept."""

    reads_prefixes = True

    def __init__(self, policy: Policy, max_rows: int, graphs: DecodeGraphs | None = None):
        self.policy, self.max_rows, self.graphs = policy, max_rows, graphs

    def open(self, params: SamplingParams, prefix_source: PrefixSource | None = None) -> LocalEngine:
        """An engine that takes prompts' keys and values from `prefix_source`."""
        return LocalEngine(self.policy, params, max_rows=self.max_rows, prefix_source=prefix_source, graphs=self.graphs)

    def sleep(self) -> None:
        """Graphs give back what is large."""
        if self.graphs is not None:
            self.graphs.rest()

    def close(self) -> None:
        """Give back what graphs hold."""
        if self.graphs is not None:
            self.graphs.release()


class VllmEngines:
    """vLLM in this process (rollout.vllm.servers=0) or as server processes."""

    reads_prefixes = False

    def __init__(self, config: Config, policy: Policy, processor: Any):
        require_vllm()
        options = config.rollout.vllm
        self.sleeps = options.sleep
        # vLLM reads the model's shape from a folder; the servers' output goes there too.
        self.folder = Path(tempfile.mkdtemp(prefix="rollplex_vllm_"))
        try:
            save_without_weights(policy.model, processor, self.folder)
            settings = host_settings(config, str(self.folder))
            self.hosted = HostedEngine(
                policy,
                self._starter(settings, options.servers, options.start_timeout_s),
                max(1, options.servers),
                bucket_limit=options.bucket_mib << 20,
                timeout_s=options.call_timeout_s,
                direct=options.servers == 0 and settings.tensor_parallel == 1,
                lent=_lent(policy, settings.dtype),
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def open(self, params: SamplingParams, prefix_source: PrefixSource | None = None) -> HostedRollout:
        """vLLM computes prompts itself: `prefix_source` is not asked."""
        return self.hosted.open(params)

    def begin_publish(self) -> None:
        """Beside this process, where the engines run there."""
        self.hosted.begin_publish()

    def writing(self, who: str) -> AbstractContextManager[None]:
        """Engines may read the policy's own storage."""
        return self.hosted.writing(who)

    def metrics(self) -> dict[str, float]:
        """Bytes by the way that they went, and seconds."""
        return self.hosted.metrics()

    def sleep(self) -> None:
        """Release weights and KV cache, with rollout.vllm.sleep."""
        if self.sleeps:
            self.hosted.sleep()

    def close(self) -> None:
        """End vLLM and remove its folder."""
        self.hosted.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _starter(self, settings: HostSettings, servers: int, start_timeout_s: float) -> Callable[[int], Host]:
        def start(number: int) -> Host:
            if servers == 0:
                return VllmHost(settings)
            return ServerHost(
                f"{VllmHost.__module__}:{VllmHost.__name__}",
                settings,
                f"vLLM server {number}",
                log=self.folder / f"server-{number}.log",
                start_timeout_s=start_timeout_s,
            )

        return start


def _lent(policy: Policy, engine_dtype: str) -> LentWeights | None:
    """The policy's weights where engines can use them in place; None: nothing could be."""
    held = str(policy.dtype).removeprefix("torch.")
    if held != engine_dtype:
        _log.info("all weights are pushed: training holds %s, vLLM %s (rollout.vllm.engine_dtype)", held, engine_dtype)
        return None
    return LentWeights(policy.model)


def host_settings(config: Config, model_folder: str) -> HostSettings:
    """What each vLLM engine is built from."""
    rollout, options = config.rollout, config.rollout.vllm
    return HostSettings(
        model_folder=model_folder,
        dtype=options.engine_dtype or config.model.dtype,
        tensor_parallel=config.sharing.rollout_tp,
        max_model_len=options.max_sequence_tokens,
        max_rows=-(-rollout.max_decode_rows // max(1, options.servers)),
        kv_cache_bytes=int(options.kv_cache_gib * 2**30),
        enforce_eager=options.enforce_eager,
        temperature=rollout.temperature,
        sleep=options.sleep,
        timeout_s=options.call_timeout_s,
    )


def local_engines(config: Config, policy: Policy) -> LocalEngines:
    """Those of a process that has the whole model, graphed where rollout.decode_graphs and the device allow it."""
    return LocalEngines(policy, config.rollout.max_decode_rows, decode_graphs(config, policy))


def build_engines(config: Config, policy: Policy, processor: Any) -> Engines:
    """The engines that rollout.engine names. Raises ConfigError when vllm is asked for and not installed."""
    if config.rollout.engine == "local":
        return local_engines(config, policy)
    return VllmEngines(config, policy, processor)
