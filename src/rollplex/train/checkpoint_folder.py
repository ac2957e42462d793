"""Checkpoint folders that are either whole or not there: written beside their place, then renamed into it.

`manifest.json`, written last, lists size and sha256 of every other file. A kill at any moment leaves the old
checkpoint, the new one, or both; leftovers carry names that start with a dot and are removed by the next write.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from rollplex.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_HASH_BLOCK = 1 << 22


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; on leaving it becomes `target`, whole and on disk, in place of what was there.

    When the body or the disk fails nothing of it remains and `target` is what it was; a file system error becomes a
    CheckpointError that names the cause, the free space and the checkpoint that is still intact.
    """
    temporary = target.parent / f".{target.name}.writing"
    try:
        _restore_replaced(target.parent, glob.escape(target.name))
        shutil.rmtree(temporary, ignore_errors=True)  # of a writer that was killed
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        _seal(temporary)
        _swap_in(temporary, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_write_failure(temporary, target, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def recover(output_dir: Path) -> None:
    """Finish or undo what a killed writer or remover left in `output_dir`. For the one process that writes there."""
    _restore_replaced(output_dir)
    for pattern in (".*.writing", ".*.replaced", ".*.removed"):
        for leftover in output_dir.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def step_of(folder: Path) -> int | None:
    """N of a folder named checkpoint-N; None for another name."""
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def newest_complete(output_dir: str | Path) -> Path | None:
    """The checkpoint of the highest step in `output_dir` whose files all have their sizes; None when there is none.

    A damaged one is passed over with a warning that names the file.
    """
    _restore_replaced(Path(output_dir))
    for folder in reversed(_checkpoints(Path(output_dir))):
        try:
            verify_sizes(folder)
        except CheckpointError as error:
            logger.warning("passing over %s: %s", folder, error)
        else:
            return folder
    return None


def prune(output_dir: str | Path, save_total_limit: int | None) -> None:
    """Remove the oldest checkpoints beyond `save_total_limit`; never the newest complete one. None keeps all."""
    recover(Path(output_dir))
    newest = newest_complete(output_dir)
    if save_total_limit is None or newest is None:
        return
    for folder in _checkpoints(Path(output_dir))[:-save_total_limit]:
        if folder == newest:
            continue
        # Renamed first: a kill while files are being removed must not leave half a checkpoint under a valid name.
        removed = folder.rename(folder.parent / f".{folder.name}.removed")
        shutil.rmtree(removed)


def verify_sizes(folder: Path) -> dict[str, dict[str, int | str]]:
    """The manifest's entries by file name. Raises CheckpointError naming a file that is missing or cut short."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST} (run.resume_from_checkpoint)")
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); resume from another checkpoint") from error
    for name, (size, _) in expected.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; resume from another checkpoint (run.resume_from_checkpoint)")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"{file} is cut short or grown: it has {file.stat().st_size} bytes, needed {size}; resume from another "
                "checkpoint (run.resume_from_checkpoint)"
            )
    return {name: {"size": size, "sha256": digest} for name, (size, digest) in expected.items()}


def verify_checksums(folder: Path) -> None:
    """`verify_sizes`, then the sha256 of every file. Raises CheckpointError naming the first that differs."""
    for name, entry in verify_sizes(folder).items():
        found = _sha256(folder / name)
        if found != entry["sha256"]:
            raise CheckpointError(
                f"{folder / name} is damaged: its sha256 is {found[:12]}..., needed {str(entry['sha256'])[:12]}...; "
                "resume from another checkpoint (run.resume_from_checkpoint)"
            )


def _checkpoints(output_dir: Path) -> list[Path]:
    """checkpoint-N folders by rising N, complete or not."""
    if not output_dir.is_dir():
        return []
    numbered = [(step, folder) for folder in output_dir.iterdir() if (step := step_of(folder)) is not None]
    return [folder for _, folder in sorted(numbered)]


def _restore_replaced(output_dir: Path, name: str = "*") -> None:
    """Put back what a writer had moved aside when it was killed before its new folder was in place."""
    for leftover in output_dir.glob(f".{name}.replaced"):
        target = output_dir / leftover.name.removeprefix(".").removesuffix(".replaced")
        if not target.exists():
            logger.warning("restoring %s: the process that was replacing it was killed", target)
            leftover.rename(target)


def _seal(folder: Path) -> None:
    """Write the manifest and force everything to disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)} for path in files
    }
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": entries}, indent=1) + "\n", encoding="utf-8")
    for path in (*files, manifest):
        _fsync(path)
    for directory in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        _fsync(directory)


def _swap_in(temporary: Path, target: Path) -> None:
    replaced = target.parent / f".{target.name}.replaced"
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    temporary.rename(target)
    _fsync(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced, ignore_errors=True)


def _write_failure(temporary: Path, target: Path, error: BaseException) -> str:
    written = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file()) if temporary.is_dir() else 0
    shutil.rmtree(temporary, ignore_errors=True)
    parent = target.parent if target.parent.is_dir() else Path.cwd()
    intact = newest_complete(target.parent)
    return (
        f"cannot write {target}: {error} after {written / 2**20:.1f} MiB, "
        f"{shutil.disk_usage(parent).free / 2**20:.1f} MiB free; "
        "make room, or set run.output_dir to another disk or run.save_total_limit lower; "
        f"last checkpoint: {f'{intact} (intact)' if intact else 'none'}"
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
