"""Named tensors on disk: one safetensors file, or shards with an index, as transformers lays them out.

Tensors may be views of larger storages; each is copied out when its shard is written, so extra memory is one shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SHARD_BYTES = 2 << 30


class StoredTensor(NamedTuple):
    """A tensor as it will be written: its size is known before it is read (or computed)."""

    name: str
    num_bytes: int
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> StoredTensor:
        """`tensor` as it stands when it is read."""
        return cls(name, tensor.numel() * tensor.element_size(), tensor.detach)


def write_tensors(
    tensors: Sequence[StoredTensor], folder: Path, stem: str = "model", shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `<stem>.safetensors`, or shards of about `shard_bytes` and `<stem>.safetensors.index.json`.

    File system errors come through as OSError or SafetensorError.
    """
    shards = _into_shards(tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        suffix = "" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"
        copies = {tensor.name: tensor.read().to("cpu", copy=True).contiguous() for tensor in shard}
        save_file(copies, folder / f"{stem}{suffix}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(copies, f"{stem}{suffix}.safetensors")
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")


def tensor_file_names(folder: Path, stem: str = "model") -> list[str]:
    """Names of the files that hold `stem`, whether they exist or not. Raises ValueError for a broken index."""
    index = folder / f"{stem}.safetensors.index.json"
    if not index.is_file():
        return [f"{stem}.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a weight index: {error!r}") from error


def read_tensors(folder: Path, stem: str = "model") -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of `stem` in turn, on the CPU."""
    for file_name in tensor_file_names(folder, stem):
        with safe_open(folder / file_name, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


@contextmanager
def sliced_tensors(folder: Path, stem: str = "model") -> Iterator[dict[str, Any]]:
    """Slices of all tensors of `stem` by name, read from their files when they are indexed, for the block."""
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(folder / name, framework="pt")) for name in tensor_file_names(folder, stem)
        ]
        yield {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping


def tensor_shapes(folder: Path, stem: str = "model") -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, safetensors dtype name such as F32) of each tensor of `stem`, from the headers only."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for file_name in tensor_file_names(folder, stem):
        with safe_open(folder / file_name, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                shapes[name] = (tuple(part.get_shape()), part.get_dtype())
    return shapes


def safetensors_sizes(path: Path) -> tuple[int, int]:
    """(bytes found, bytes that the header calls for) of one file; of a cut header, the header alone is called for."""
    found = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return found, 8
        header_size = int.from_bytes(prefix, "little")
        if 8 + header_size > found:
            return found, 8 + header_size
        header = json.loads(file.read(header_size))
    ends = (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    return found, 8 + header_size + max(ends, default=0)


def _into_shards(tensors: Sequence[StoredTensor], shard_bytes: int) -> list[list[StoredTensor]]:
    shards: list[list[StoredTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return shards
