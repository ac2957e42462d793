"""The rules that keep the code base readable, checked on the files themselves (CONTRIBUTING.md lists them)."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from rollplex.config import Config
from rollplex.models.adapter import FAMILIES
from rollplex.tasks.task import TASKS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "rollplex"
SOURCES = sorted(PACKAGE.rglob("*.py"))
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")

MOST_LINES = 400
# Names that say nothing about what is decided inside.
NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "base", "core", "shared"}
HEAVY = ("torch", "torchvision", "transformers", "datasets", "peft", "av")


def _pure_modules() -> list[str]:
    contracts = SETTINGS["tool"]["importlinter"]["contracts"]
    return next(contract["source_modules"] for contract in contracts if contract["id"] == "pure")


def _names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_package_is_found() -> None:
    assert PACKAGE / "types.py" in SOURCES


@pytest.mark.parametrize("module", [*_pure_modules(), "rollplex.cli"])
def test_imports_no_torch(module: str) -> None:
    # In a fresh interpreter: here, torch is long imported. The CLI is not pure, but its --help must be quick.
    code = f"import sys, {module}; print(sorted(set({HEAVY}) & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (answer.returncode, answer.stdout) == (0, "[]\n"), answer.stderr


def test_strict_types_cover_the_pure_modules() -> None:
    strict = [o["module"] for o in SETTINGS["tool"]["mypy"]["overrides"] if o.get("disallow_any_generics")]
    assert strict == [_pure_modules()]


@pytest.mark.parametrize("path", SOURCES, ids=_names)
def test_file(path: Path) -> None:
    text = path.read_bytes()
    assert text.count(b"\n") <= MOST_LINES, f"{_names(path)} is longer than {MOST_LINES} lines: split it by concept"
    assert text.isascii(), f"{_names(path)} holds characters that are not ASCII"
    parts = {part.removesuffix(".py").strip("_") for part in path.relative_to(PACKAGE).parts}
    assert not parts & NAMELESS, f"{_names(path)}: name the module by its concept"
    assert ast.get_docstring(ast.parse(text)), f"{_names(path)} has no docstring that says what it decides"


def _cuda_uses(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
            yield node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            if any(re.match(r"torch\.cuda(\.|$)", prefix + alias.name) for alias in node.names):
                yield node.lineno


CUDA = ("runtime/device.py", "memory/host_copies.py", "rollout/capture.py")  # each with its CPU twin beside it


def test_cuda_only_where_its_twin_is() -> None:
    found = {_names(path): list(_cuda_uses(ast.parse(path.read_bytes()))) for path in SOURCES}
    assert [name for name, lines in found.items() if lines and not name.endswith(CUDA)] == []


@pytest.mark.parametrize(
    "code",
    ["torch.cuda.synchronize()", "import torch.cuda", "from torch import cuda", "from torch.cuda import amp, Stream"],
)
def test_cuda_is_noticed_however_it_is_written(code: str) -> None:
    assert list(_cuda_uses(ast.parse(code))) == [1]


@pytest.mark.parametrize("target", [*FAMILIES.values(), *TASKS.values()])
def test_registry_entry_imports(target: str) -> None:
    module, name = target.split(":")
    assert isinstance(getattr(importlib.import_module(module), name), type)


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field.description
        for section in _sections(field.annotation):
            yield from _leaves(section, f"{prefix}{name}.")


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _sections(argument)


def test_every_option_is_described() -> None:
    described = dict(_leaves(Config))
    assert "model.lora.r" in described, "the walk over the configuration misses optional sections"
    # A sentence: it starts like one and ends like one.
    poor = [key for key, text in described.items() if not text or len(text) < 10 or text[-1] != "."]
    assert poor == []


def _readme_tree() -> str:
    return next(block for block in README.split("```") if "src/rollplex/" in block and "|--" in block)


def test_readme_tree_is_the_real_one() -> None:
    entries = re.findall(r"^(\|   )?[|`]-- (\S+)", _readme_tree(), flags=re.MULTILINE)
    inner = {name for indent, name in entries if indent}
    outer = {name for indent, name in entries if not indent}
    packages = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert inner == packages | {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if tracked.returncode == 0:  # a source archive has no git; its folders are then unknown among build products
        folders = {line.split("/")[0] + "/" for line in tracked.stdout.split() if "/" in line and line[0] != "."}
        links = {name for name in outer if (ROOT / name).is_symlink()}
        assert {name for name in outer if name != "src/rollplex/"} - links == folders - {"src/"}
    assert all((ROOT / name).is_dir() for name in outer)


def test_readme_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links and all((ROOT / link).exists() for link in links)
