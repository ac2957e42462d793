"""What a checkpoint holds, and going on from it bitwise: weights, optimizer, and the trainer's own state.

    checkpoint-N/  model files in Hugging Face format (a peft adapter with LoRA) | optimizer.safetensors
                   trainer_state.json | config.yaml | manifest.json

Only safetensors, JSON and YAML: nothing in it can run code when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rollplex.config import Config
from rollplex.errors import CheckpointError, ConfigError
from rollplex.models.lora import is_lora
from rollplex.models.save import save_pretrained, stored_state, weights_stem
from rollplex.models.tensor_files import StoredTensor, read_tensors, tensor_file_names, tensor_shapes, write_tensors
from rollplex.recipes.load import dump_config
from rollplex.recipes.yaml_text import parse_mapping
from rollplex.train.checkpoint_folder import atomic_folder, verify_checksums
from rollplex.train.resume import check_same_run

FORMAT_VERSION = 1
OPTIMIZER = "optimizer"
TRAINER_STATE = "trainer_state.json"
CONFIG = "config.yaml"
BASE_MODEL = "base_model"
# Entries of trainer_state.json that this module writes itself. The learning rate follows from optimizer_steps.
_OWN_KEYS = ("format_version", "optimizer_steps", "trained_parameters")
Part = Callable[[str, torch.Tensor], torch.Tensor]
_DTYPE_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}


class StatefulOptimizer(Protocol):
    """The part of train.optimizer.PolicyOptimizer that a checkpoint needs."""

    num_steps: int

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The trained parameters by name."""

    def named_state(self) -> dict[str, torch.Tensor]:
        """Tensors by '<state>/<parameter name>'."""

    def load_named_state(self, state: dict[str, torch.Tensor], num_steps: int) -> None:
        """Inverse of `named_state`."""


@dataclass(frozen=True, slots=True)
class WholeState:
    """Everything that a checkpoint stores of a model that several processes hold in parts. All of them must read all
    tensors, in order: weights, then optimizer; one tensor is whole at a time."""

    weights: Sequence[StoredTensor]  # by the names of models.save.stored_state
    optimizer: Sequence[StoredTensor]  # by those of StatefulOptimizer.named_state

    def read(self) -> None:
        """This process's part in a checkpoint that another one writes."""
        for tensor in (*self.weights, *self.optimizer):
            tensor.read()


@dataclass(frozen=True, slots=True)
class RestoredState:
    """What `load_checkpoint` hands back besides the tensors that it put in place."""

    trainer_state: Mapping[str, Any]  # as it was given to save_checkpoint
    optimizer_steps: int
    trained_parameters: frozenset[str]


def save_checkpoint(
    folder: str | Path,
    *,
    model: Any,
    processor: Any,
    optimizer: StatefulOptimizer,
    trainer_state: Mapping[str, Any],
    config: Config | None = None,
    whole: WholeState | None = None,
) -> Path:
    """Write a checkpoint at `folder` (`<output_dir>/checkpoint-N`), whole or not at all.

    `trainer_state` holds JSON values (step, weight version, data position, seed, ...). whole: what to store, where
    `model` is its names and sizes only. A LoRA model that was built rather than loaded gets its base written once, to
    `base_model` beside the checkpoints, so that the adapter loads with the plain auto classes. Raises CheckpointError
    when the disk fails or a value is no JSON; the last checkpoint then stays as it was.
    """
    folder = Path(folder).absolute()
    clash = sorted(set(_OWN_KEYS) & trainer_state.keys())
    if clash:
        raise CheckpointError(f"trainer_state must not have the keys {', '.join(clash)}: they are the checkpoint's own")
    ours = (FORMAT_VERSION, optimizer.num_steps, sorted(optimizer.weights))
    try:
        text = json.dumps({**dict(zip(_OWN_KEYS, ours, strict=True)), **trainer_state}, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the trainer's state cannot be written as JSON: {error}") from error
    if is_lora(model):
        _save_base_once(model, processor, folder.parent / BASE_MODEL)
    with atomic_folder(folder) as temporary:
        save_pretrained(model, processor, temporary, tensors=None if whole is None else whole.weights)
        own = [StoredTensor.of(name, tensor) for name, tensor in optimizer.named_state().items()]
        write_tensors(own if whole is None else whole.optimizer, temporary, OPTIMIZER)
        (temporary / TRAINER_STATE).write_text(text + "\n", encoding="utf-8")
        if config is not None:
            (temporary / CONFIG).write_text(dump_config(config), encoding="utf-8")
    return folder


def load_checkpoint(
    folder: str | Path,
    *,
    model: Any,
    optimizer: StatefulOptimizer | None = None,
    config: Config | None = None,
) -> RestoredState:
    """Put the weights of `folder` into `model` and its state into `optimizer`, in place, and return the rest.

    All is checked before anything is changed: sizes and checksums, that `config` continues the same run, and that
    every tensor has its place with the same shape and dtype. Raises CheckpointError naming file, tensor or option.
    """
    folder = Path(folder).absolute()
    restored = check_checkpoint(folder, model=model, config=config)
    if optimizer is not None:
        load_optimizer(folder, optimizer, restored)
    load_weights(folder, model)
    return restored


def check_checkpoint(folder: Path, *, model: Any, config: Config | None = None) -> RestoredState:
    """What a checkpoint says of its run, once sizes and checksums, run and weights are found to fit `config` and
    `model`, of which only names and sizes are looked at. Raises CheckpointError as `load_checkpoint` does."""
    verify_checksums(folder)
    state = _read_trainer_state(folder)
    if config is not None:
        check_same_run(_read_config(folder), config, folder)
    _check_weights(folder, weights_stem(model), stored_state(model))
    trainer_state = {key: value for key, value in state.items() if key not in _OWN_KEYS}
    return RestoredState(trainer_state, state["optimizer_steps"], frozenset(state["trained_parameters"]))


def load_optimizer(
    folder: Path, optimizer: StatefulOptimizer, restored: RestoredState, *, part: Part = lambda _, whole: whole
) -> None:
    """Put the optimizer state of `folder` into `optimizer`. part: from name and full tensor what this process holds of
    it. Raises CheckpointError, before anything is changed, where it does not fit."""
    _check_trained(folder, restored.trained_parameters, frozenset(optimizer.weights))
    state = {name: part(name, tensor) for name, tensor in read_tensors(folder, OPTIMIZER)}
    optimizer.load_named_state(state, restored.optimizer_steps)


def load_weights(folder: Path, model: Any) -> None:
    """Put the weights of `folder`, as `save_pretrained` writes them, into `model` in place.

    Raises CheckpointError, before anything is changed, for tensors that do not have their place in it. Whether the
    files are whole is the caller's to check (`verify_checksums`).
    """
    targets, stem = stored_state(model), weights_stem(model)
    _check_weights(folder, stem, targets)
    with torch.no_grad():
        for name, tensor in read_tensors(folder, stem):
            targets[name].copy_(tensor)


def _save_base_once(model: Any, processor: Any, base: Path) -> None:
    adapter_config = model.peft_config[model.active_adapter]
    if adapter_config.base_model_name_or_path is not None:
        return
    if not base.exists():
        with atomic_folder(base) as temporary:
            save_pretrained(model, processor, temporary, lora="base")
    adapter_config.base_model_name_or_path = str(base)


def _read_trainer_state(folder: Path) -> dict[str, Any]:
    path = folder / TRAINER_STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error} (run.resume_from_checkpoint)") from error
    found = state.get("format_version") if isinstance(state, dict) else None
    if found != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {found}, this version of Rollplex reads {FORMAT_VERSION}; resume with the "
            "version that wrote it"
        )
    return dict(state)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        return parse_mapping(path.read_text(encoding="utf-8"), str(path)).tree
    except (OSError, ConfigError) as error:
        raise CheckpointError(f"{path} cannot be read: {error} (run.resume_from_checkpoint)") from error


def _check_trained(folder: Path, before: frozenset[str], now: frozenset[str]) -> None:
    """Also catches parameters that have no optimizer state yet because no step gave them a gradient."""
    changed = sorted(before ^ now)
    if changed:
        verb = "trained" if changed[0] in before else "did not train"
        raise CheckpointError(
            f"{folder} is of a run that {verb} {changed[0]} ({len(changed)} parameters differ); set "
            "model.freeze_vision and model.lora as they were"
        )


def _check_weights(folder: Path, stem: str, targets: Mapping[str, torch.Tensor]) -> None:
    if not (folder / tensor_file_names(folder, stem)[0]).is_file():
        holds, has = ("a full model", "LoRA adapters") if stem != "model" else ("LoRA adapters", "none")
        raise CheckpointError(f"{folder} holds {holds}, this run's model has {has}: set model.lora as it was")
    stored = tensor_shapes(folder, stem)
    needed = {name: (tuple(t.shape), _DTYPE_NAMES.get(t.dtype, str(t.dtype))) for name, t in targets.items()}
    problems = [
        *(f"{name} is missing" for name in sorted(needed.keys() - stored.keys())),
        *(f"{name} is not in this run's model" for name in sorted(stored.keys() - needed.keys())),
        *(
            f"{name} is {stored[name][1]} {stored[name][0]}, needed {needed[name][1]} {needed[name][0]}"
            for name in needed
            if name in stored and stored[name] != needed[name]
        ),
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{folder} is of another model: {'; '.join(problems[:3])}{more}; resume with the model.* options of its "
            f"{CONFIG}"
        )
