"""What runs inside vLLM's workers: prompts' positions, logits at a temperature, and how each layer gets new weights.

A worker first loads all weights as vLLM loads a checkpoint, which also tells what each of its parameters is made of.
Then it says what it holds (`rollplex_layers`), and where weights/lending.py finds that a layer is a view of training's
storage, the layer is put on that storage. vLLM's kernels for the CPU multiply by packed copies, which a publish makes
anew; all other kernels read the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rollplex.rollout.hosting import WeightBucket
from rollplex.weights.layout import Store
from rollplex.weights.lending import CAPTURED, EngineLayer, EngineTensor, Verdict, Way
from rollplex.weights.loan import Loan
from rollplex.weights.share import Backing

_PROBE_ROWS = 2
_TOGETHER = "vLLM reloads it together with the layers inside it, or around it"
# What turns loaded weights into those of kernels, and does nothing but what `_is_packed` sees.
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


class WorkerHooks:
    """Methods that vLLM adds to its worker class (worker_extension_cls); each runs in every worker."""

    model_runner: Any  # of vLLM's worker
    vllm_config: Any
    _rollplex_loaded: set[str]
    _rollplex_wanted: set[str]  # parameters of the load that is open; empty: none is
    _rollplex_noted: dict[str, list[str]]  # parameter -> the tensors that were loaded into it, by this load so far
    _rollplex_sources: dict[str, list[str]]  # the same after the first whole load; empty before
    _rollplex_backing: Backing  # keeps the mapping alive
    _rollplex_packed: list[tuple[Any, Mapping[str, torch.Tensor]]]  # layers with the views that they are packed from
    _rollplex_pushed: list[Any] | None  # layers that are loaded; None: all

    def rollplex_prepare(self, temperature: float) -> None:
        """Wrap the two methods of the model that vllm_engine.py names."""
        model = self.model_runner.get_model()
        self._rollplex_pushed, self._rollplex_packed = None, []
        self._rollplex_sources, self._rollplex_wanted = {}, set()
        own_positions, own_logits = model.get_mrope_input_positions, model.compute_logits

        def positions(input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
            if not mm_features:
                own: tuple[torch.Tensor, int] = own_positions(input_tokens, mm_features)
                return own
            first = mm_features[0]
            given = first.data[positions_field(first.modality)].data
            return given[:, :-1], int(given[0, -1]) - len(input_tokens)

        def logits(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            raw = own_logits(*args, **kwargs)  # None on ranks that do not sample
            return None if raw is None else raw.float() / temperature

        model.get_mrope_input_positions = positions
        if temperature != 1.0:
            model.compute_logits = logits

    def rollplex_begin_load(self) -> None:
        """Open vLLM's in-place reload: layers take checkpoint tensors until it is finished. One that was broken off is
        closed first, since half a layer of it may be waiting."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self._rollplex_wanted:
            self.rollplex_end_load()
        self._rollplex_loaded, self._rollplex_noted = set(), {}
        self._rollplex_wanted = self._parameters_of(self._loading())
        for layer in self._loading():
            initialize_layerwise_reload(layer)

    def rollplex_load(self, bucket: WeightBucket) -> None:
        """Write a bucket's tensors, those of layers that are pushed."""
        model, wanted = self.model_runner.get_model(), self._wanted_sources()
        tensors = (item for item in bucket.tensors() if wanted is None or item[0] in wanted)
        with torch.no_grad():
            if self._rollplex_sources:
                self._rollplex_loaded |= model.load_weights(tensors)
                return
            for name, tensor in tensors:  # one by one: what it tells is where each went
                loaded = model.load_weights([(name, tensor)])
                self._rollplex_loaded |= loaded
                for own in loaded:
                    self._rollplex_noted.setdefault(own, []).append(name)

    def rollplex_end_load(self) -> set[str]:
        """Close the reload and pack anew what is packed from training's storage; names of parameters of pushed layers
        that got no value."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        for layer in self._loading():
            finalize_layerwise_reload(layer, self.model_runner.model_config)
        self._pack_tied()
        for layer, views in self._rollplex_packed:
            _pack(layer, views)
        missing, self._rollplex_wanted = self._rollplex_wanted - self._rollplex_loaded, set()
        if not missing and not self._rollplex_sources:
            self._rollplex_sources = self._rollplex_noted
        return missing

    def rollplex_layers(self) -> tuple[EngineLayer, ...]:
        """All layers with parameters, as they are loaded. Call it after a load of all weights."""
        model, captured = self.model_runner.get_model(), self._captured()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found, seen = list[EngineLayer](), set[int]()
        reloaded = ""  # a layer that vLLM reloads with all that is inside it; outer ones come first
        for name, layer, own in _with_parameters(model):
            inside = bool(reloaded) and name.startswith(f"{reloaded}.")
            fixed = captured or (_TOGETHER if inside else _fixed(layer))
            if fixed == _TOGETHER and not inside:
                reloaded = name
            packed = _is_packed(layer)
            if packed or not seen.issuperset(map(id, own.values())):  # else a tied head: the embedding speaks for it
                tensors = tuple(self._described(layer, names[id(p)], leaf, p) for leaf, p in own.items())
                device = str(next(iter(own.values())).device)
                found.append(EngineLayer(name, device, tensors, packed, fixed))
            seen.update(map(id, own.values()))
        return tuple(found)

    def rollplex_share(self, loan: Loan, verdicts: Sequence[Sequence[Verdict]]) -> tuple[Verdict, ...]:
        """Put layers on training's storage as the verdicts of this rank say. What turns out to hold other numbers than
        training does is left alone, and its verdict says so."""
        from vllm.distributed import get_tensor_model_parallel_rank

        model = self.model_runner.get_model()
        self._rollplex_backing = loan.backing()
        self._rollplex_packed, pushed, found = [], list[Any](), list[Verdict]()
        with torch.no_grad():
            for verdict in verdicts[get_tensor_model_parallel_rank()]:
                layer = model.get_submodule(verdict.layer.name)
                views = self._views(verdict)
                if verdict.way is Way.PACKED and not _packed_alike(layer, views):
                    verdict = verdict.refused("its packed copy multiplies otherwise than training's rows do")
                elif verdict.way is Way.ALIASED and not _aliased(layer, views):
                    verdict = verdict.refused("its numbers are not those of training's rows")
                if verdict.way is Way.PUSHED:
                    pushed.append(layer)
                elif verdict.way is Way.PACKED:
                    self._rollplex_packed.append((layer, views))
                found.append(verdict)
        self._rollplex_pushed = pushed
        return tuple(found)

    def _loading(self) -> list[Any]:
        """The modules whose weights a load replaces."""
        return [self.model_runner.get_model()] if self._rollplex_pushed is None else self._rollplex_pushed

    def _wanted_sources(self) -> set[str] | None:
        """The tensors that pushed layers take; None: all."""
        if self._rollplex_pushed is None:
            return None
        return {source for name in self._rollplex_wanted for source in self._rollplex_sources[name]}

    def _parameters_of(self, layers: Sequence[Any]) -> set[str]:
        inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
        return {name for name, p in self.model_runner.get_model().named_parameters() if id(p) in inside}

    def _described(self, layer: Any, name: str, leaf: str, parameter: torch.Tensor) -> EngineTensor:
        """A parameter as it is loaded; one whose memory was freed after packing as vLLM recorded it before."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        loaded = parameter if parameter.numel() else get_layerwise_info(layer).restore_metadata[0][leaf]
        sources = tuple(dict.fromkeys(self._rollplex_sources.get(name, ())))
        dtype = str(loaded.dtype).removeprefix("torch.")
        return EngineTensor(leaf, sources, dtype, tuple(loaded.shape), tuple(loaded.stride()))

    def _captured(self) -> str:
        """Why no parameter may move: graphs that were captured read the addresses of that time."""
        mode = self.vllm_config.compilation_config.cudagraph_mode
        if mode is None or mode.name == "NONE":
            return ""
        return CAPTURED

    def _views(self, verdict: Verdict) -> dict[str, torch.Tensor]:
        store = self._rollplex_backing.stores
        return {
            name: store[Store.BACKING].as_strided(view.shape, view.strides, view.offset) for name, view in verdict.views
        }

    def _pack_tied(self) -> None:
        """vLLM loads a tied head through the embedding alone, and leaves the copy that the head multiplies by as it was
        (its reload, limitation 2)."""
        seen: set[int] = set()
        loading = {id(module) for layer in self._loading() for module in layer.modules()}
        for _, layer, own in _with_parameters(self.model_runner.get_model()):
            if id(layer) in loading and _is_packed(layer) and any(id(p) in seen for p in own.values()):
                layer.quant_method.process_weights_after_loading(layer)
            seen |= {id(parameter) for parameter in own.values()}


def positions_field(modality: str) -> str:
    """The field of a media item that carries the prompt's positions; the last column is where responses start."""
    return f"rollplex_{modality}_positions"


def _with_parameters(model: Any) -> Iterator[tuple[str, Any, dict[str, torch.Tensor]]]:
    """(name, module, its own parameters)"""
    for name, layer in model.named_modules():
        own = {leaf: parameter for leaf, parameter in layer._parameters.items() if parameter is not None}
        if own:
            yield name, layer, own


def _is_packed(layer: Any) -> bool:
    """Whether the layer's kernel has a copy: on the CPU, unless it multiplies by the parameter itself."""
    multiply = getattr(layer, "cpu_linear", None)
    return multiply is not None and multiply is not torch.nn.functional.linear and not _only_looks_up(layer)


def _only_looks_up(layer: Any) -> bool:
    """An embedding that is no head: vLLM packs it for the CPU as well, and never multiplies by it."""
    return type(layer).__name__ == "VocabParallelEmbedding"


def _fixed(layer: Any) -> str:
    """Why a layer's parameters cannot be exchanged; "" when they can."""
    if any(True for child in layer.children() for _ in child.parameters()):
        return _TOGETHER
    method = getattr(layer, "quant_method", None)
    if method is not None and type(method).__name__ not in _PLAIN_METHODS:
        return f"vLLM turns it into another format ({type(method).__name__})"
    return ""


def _aliased(layer: Any, views: Mapping[str, torch.Tensor]) -> bool:
    """Put the layer's parameters on `views`. False, and nothing is done, when they hold other numbers."""
    if not all(torch.equal(layer._parameters[name], view) for name, view in views.items()):
        return False
    for name, view in views.items():
        layer._parameters[name].data = view
    if _only_looks_up(layer) and hasattr(layer, "cpu_linear"):
        layer.cpu_linear = torch.nn.functional.linear  # lets go of the copy
    return True


def _packed_alike(layer: Any, views: Mapping[str, torch.Tensor]) -> bool:
    """Pack the layer from `views`. False, and nothing is changed, when it then multiplies otherwise than before."""
    before = {"cpu_linear": layer.cpu_linear, **layer._parameters}
    data = {name: parameter.data for name, parameter in layer._parameters.items() if parameter is not None}
    weight = views["weight"]
    probe = torch.randn(_PROBE_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    wanted = layer.cpu_linear(probe, layer.weight, None)
    biases = all(torch.equal(data[name], view) for name, view in views.items() if name != "weight")
    if biases:
        _pack(layer, views)
        if torch.equal(layer.cpu_linear(probe, layer.weight, None), wanted):
            return True
    for name, value in before.items():
        setattr(layer, name, value)
    for name, held in data.items():
        layer._parameters[name].data = held
    return False


def _pack(layer: Any, views: Mapping[str, torch.Tensor]) -> None:
    """The copy that the layer multiplies by, from `views`. vLLM's own code makes it, and then drops the weight."""
    for name, view in views.items():
        parameter = layer._parameters[name]
        if parameter.numel():
            parameter.data = view
        else:
            setattr(layer, name, torch.nn.Parameter(view, requires_grad=False))
    layer.quant_method.process_weights_after_loading(layer)
