"""One process at a time writes a run folder."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollplex.config import Config
from rollplex.errors import CheckpointError, ConfigError
from rollplex.runtime.folder_claim import claimed
from rollplex.runtime.trainer import train

HOLD = """
import sys, time
from pathlib import Path
from rollplex.runtime.folder_claim import claimed
with claimed(Path(sys.argv[1])):
    print("claimed", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "claimed\n"
            with pytest.raises(ConfigError, match=r"another process is training into run\.output_dir .*new/run"):
                claimed(folder).__enter__()
        finally:
            other.send_signal(signal.SIGKILL)
    with claimed(folder):
        assert folder.is_dir()
    with claimed(folder):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"cannot write the run folder .*run\.output_dir"):
        claimed(tmp_path / "run").__enter__()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(CheckpointError, match=r"cannot write the run folder .*run\.output_dir"):
        claimed(tmp_path / "run").__enter__()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_warned_of(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING, "rollplex.runtime"), pytest.raises(KeyError) as caught:
        with claimed(tmp_path / "run"):
            raise KeyError("of the run itself")
    assert "knows no locks: see to it that one process writes there" in caplog.text
    assert caught.value.__context__ is None  # and says nothing of locks


def test_train_claims_its_folder_before_anything_slow(tmp_path: Path) -> None:
    config = Config.model_validate(
        {"run": {"output_dir": str(tmp_path / "run")}, "model": {"path": str(tmp_path / "no model")}}
    )
    with claimed(tmp_path / "run"), pytest.raises(ConfigError, match="another process is training"):
        train(config)
