"""Which linear layers `model.lora.target_modules` means, by their names alone: for models and for plans. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollplex.errors import ModelError

VISION_PREFIX = "visual."  # a target "visual.qkv" means the linear layers named qkv of the vision tower


def target_layers(targets: Sequence[str], linear: Iterable[str], *, freeze_vision: bool = False) -> list[str]:
    """The names, of all linear layers in `linear`, that get adapters.

    A plain target means layers of the language model only, even where the vision tower has the same name. Raises
    ModelError when a target matches no layer or lies in a frozen vision tower, or when there is none.
    """
    names = list(linear)
    language = [name for name in names if ".language_model." in f".{name}"]
    vision = [name for name in names if ".visual." in f".{name}"]
    layers: list[str] = []
    for target in targets:
        in_vision = target.startswith(VISION_PREFIX)
        if in_vision and freeze_vision:
            raise ModelError(
                f"model.lora.target_modules names {target!r}, but model.freeze_vision is true: an adapter there would "
                "train the frozen tower; remove one of the two"
            )
        pool, name = (vision, target.removeprefix(VISION_PREFIX)) if in_vision else (language, target)
        found = [layer for layer in pool if layer.rsplit(".", 1)[-1] == name]
        if not found:
            known = sorted({layer.rsplit(".", 1)[-1] for layer in pool})
            where = "vision tower" if in_vision else "language model"
            raise ModelError(
                f"model.lora.target_modules names {target!r}, which matches no linear layer of the {where}; "
                f"it has {', '.join(known)}"
            )
        layers.extend(found)
    if not layers:
        raise ModelError("model.lora.target_modules is empty: nothing would be trained")
    return layers
