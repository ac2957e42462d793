"""A model and its processor from a folder, a hub id or a build configuration, checked before anything runs on them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from rollplex.config import ModelConfig
from rollplex.errors import ModelError
from rollplex.models.adapter import FAMILIES
from rollplex.models.build import build_model, build_processor
from rollplex.models.exactness import check_exact
from rollplex.models.lora import add_lora
from rollplex.models.tensor_files import safetensors_sizes, tensor_file_names

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with the processor that belongs to it; `model` is a peft wrapper when LoRA is on."""

    model: Any
    processor: Any


def load_model(
    config: ModelConfig, *, texts: Iterable[str] = (), seed: int = 0, processor_path: Path | None = None
) -> LoadedModel:
    """Load `config.path` or build `config.build`, cast to `config.dtype`, freeze and wrap as asked; in eval mode.

    `texts` train the tokenizer of a built model, unless `processor_path` says where its processor was saved (rows may
    have changed since); `seed` draws its weights and those of LoRA adapters. Raises ModelError for a family without an
    adapter, files that are missing or cut short, weights that do not match the architecture one to one, a processor of
    another model, and anything that `check_exact` refuses.
    """
    if config.build is not None:
        loaded = _build(config, texts, seed, processor_path)
    else:
        assert config.path is not None  # ModelConfig holds exactly one of the two
        loaded = _load(config.path, DTYPES[config.dtype])
    model = loaded.model
    check_processor(model.config, loaded.processor)
    if config.freeze_vision:
        model.model.visual.requires_grad_(False)
    if config.lora is not None:
        base_path = str(Path(config.path).absolute()) if config.path and Path(config.path).is_dir() else config.path
        model = add_lora(model, config.lora, seed=seed, base_path=base_path, freeze_vision=config.freeze_vision)
    check_exact(model)
    return LoadedModel(model.eval(), loaded.processor)


def check_processor(config: Any, processor: Any) -> None:
    """Raises ModelError when `processor` would make inputs for another model than that of `config`."""
    for part in ("tokenizer", "image_processor", "video_processor"):
        if getattr(processor, part, None) is None:
            raise ModelError(f"the processor {type(processor).__name__} has no {part} (model.path)")
    if not processor.chat_template:
        raise ModelError("the processor has no chat template: chat_template.jinja is missing (model.path)")
    vision = config.vision_config
    pairs = {
        "image_processor.patch_size": (processor.image_processor.patch_size, vision.patch_size),
        "image_processor.merge_size": (processor.image_processor.merge_size, vision.spatial_merge_size),
        "image_processor.temporal_patch_size": (
            processor.image_processor.temporal_patch_size,
            vision.temporal_patch_size,
        ),
        "video_processor.patch_size": (processor.video_processor.patch_size, vision.patch_size),
        "video_processor.merge_size": (processor.video_processor.merge_size, vision.spatial_merge_size),
        "video_processor.temporal_patch_size": (
            processor.video_processor.temporal_patch_size,
            vision.temporal_patch_size,
        ),
        "image_token_id": (processor.image_token_id, config.image_token_id),
        "video_token_id": (processor.video_token_id, config.video_token_id),
    }
    for name, (found, needed) in pairs.items():
        if found != needed:
            raise ModelError(
                f"the processor does not belong to the model: its {name} is {found}, the model's config has {needed}; "
                "use the processor that was saved with the model (model.path)"
            )
    vocab_size = config.get_text_config().vocab_size
    if len(processor.tokenizer) > vocab_size:
        raise ModelError(
            f"the processor does not belong to the model: its tokenizer has {len(processor.tokenizer)} tokens, the "
            f"model {vocab_size} (model.path)"
        )


def check_weight_files(folder: Path) -> None:
    """Raises ModelError naming the first weight file of `folder` that is missing or cut short."""
    try:
        names = tensor_file_names(folder)
    except ValueError as error:
        raise ModelError(f"{error} (model.path)") from error
    for name in names:
        path = folder / name
        if not path.is_file():
            raise ModelError(
                f"{folder} has no {name}; a model folder needs config.json and safetensors weights (model.path)"
            )
        try:
            found, needed = safetensors_sizes(path)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{path} is not a safetensors file: {error!r} (model.path)") from error
        if found != needed:
            raise ModelError(
                f"{path} is cut short or damaged: it has {found} bytes, its header calls for {needed}; copy it again "
                "(model.path)"
            )


def _build(config: ModelConfig, texts: Iterable[str], seed: int, processor_path: Path | None) -> LoadedModel:
    build = config.build
    assert build is not None  # the caller looked
    if processor_path is None:
        processor = build_processor(build.family, texts, build.vocab_size)
    else:
        processor = _load_processor(str(processor_path))
    return LoadedModel(build_model(build, processor, seed=seed, dtype=DTYPES[config.dtype]), processor)


def _load(path: str, dtype: torch.dtype) -> LoadedModel:
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} has no config.json, so it is no model in Hugging Face format (model.path)")
        _check_family(_raw_model_type(folder))
        check_weight_files(folder)
    elif folder.is_file():
        raise ModelError(f"model.path {path!r} is a file, needed the folder around it (with config.json)")
    elif _names_a_folder(path):
        raise ModelError(f"model.path {path!r} does not exist: no such folder (and no hub id is written so)")
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path {path!r} is neither a model folder nor a hub id that can be read: {_first_line(error)}"
        ) from error
    _check_family(config.model_type)
    auto_model: Any = AutoModelForImageTextToText  # its annotations do not know output_loading_info
    try:
        model, info = auto_model.from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, use_safetensors=True
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ModelError(f"the weights of {path} do not load: {_first_line(error)} (model.path)") from error
    _check_loading(path, info)
    return LoadedModel(model, _load_processor(path))


def _load_processor(path: str) -> Any:
    try:
        return AutoProcessor.from_pretrained(path)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise ModelError(f"the processor of {path} does not load: {_first_line(error)}") from error


def _names_a_folder(path: str) -> bool:
    """Whether `path` can only be meant as a folder: a hub id is `name` or `owner/name`. Asking the hub takes long."""
    return path.startswith((".", "/", "~")) or path.endswith("/") or path.count("/") > 1 or Path(path).is_absolute()


def _raw_model_type(folder: Path) -> str:
    """model_type as written: families that transformers does not know either get our message."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'} is not JSON: {error} (model.path)") from error
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(model_type, str):
        raise ModelError(f"{folder / 'config.json'} has no model_type (model.path)")
    return model_type


def _check_family(family: str) -> None:
    if family in FAMILIES:
        return
    known = ", ".join(sorted(FAMILIES))
    if family.endswith("_moe"):
        raise ModelError(f"model family {family!r} is a mixture of experts; only dense models are supported: {known}")
    raise ModelError(f"model family {family!r} has no adapter; families with one: {known} (model.path)")


def _check_loading(path: str, info: dict[str, Any]) -> None:
    """transformers initialises missing weights at random and drops unknown ones with a warning; here both raise."""
    problems = []
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        keys = sorted(str(key) for key in info.get(kind) or ())
        if keys:
            shown = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            problems.append(f"{kind.removesuffix('_keys')}: {shown}")
    if problems:
        raise ModelError(
            f"the weights of {path} do not match its config.json one to one ({'; '.join(problems)}); nothing is "
            "initialised silently: use weights of this architecture (model.path)"
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
