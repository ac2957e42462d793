"""Lets torchvision's ordinary build be imported beside a torch for the CPU alone.

That build registers fake kernels for operators that its own compiled library declares, and the library does not load
there. Declared beforehand, they do no harm: transforms are plain torch, and nothing here calls the operators.
`--install` puts this file into the environment, with a .pth file that makes every process of it declare the operators
when torchvision is first imported.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept = []  # a library's declarations go with it


class BeforeTorchvision:
    """An import hook that finds nothing, but notices torchvision."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """Declare the operators once."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in DECLARED:
                library.define(schema)
            _kept.append(library)


def hook() -> None:
    """Called by the .pth file at the start of every process, in some environments twice."""
    if not any(isinstance(finder, BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, BeforeTorchvision())


if __name__ == "__main__" and sys.argv[1:] == ["--install"]:
    packages = Path(sysconfig.get_paths()["purelib"])
    name = Path(__file__).stem
    shutil.copy(__file__, packages / f"{name}.py")
    (packages / f"{name}.pth").write_text(f"import {name}; {name}.hook()\n")
