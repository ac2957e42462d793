"""A run folder has one process that writes: a second one would mix two runs' steps and prune foreign checkpoints."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from rollplex.errors import CheckpointError, ConfigError

LOCK = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of network disks
_log = logging.getLogger(__name__)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """For the block, nobody else claims the folder `path`, which is made. The system lets go when the process dies.
    A disk without locks is warned of, and then claimed by nobody.

    Raises ConfigError when another process has it, CheckpointError when it cannot be written.
    """
    lock = FileLock(path / LOCK, blocking=False, fallback_to_soft=False)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ConfigError(
            f"another process is training into run.output_dir {path}; wait for its end, or give another folder"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise CheckpointError(f"cannot write the run folder {path}: {error} (run.output_dir)") from error
        _log.warning("the disk of run.output_dir %s knows no locks: see to it that one process writes there", path)
    try:
        yield
    finally:
        lock.release()
