"""Video decoding and frame sampling. PyAV reads the frames; which of them are kept is a pure decision of its own."""

from __future__ import annotations

import io
import logging
import math
import numbers
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from PIL import Image

from rollplex.errors import MediaError
from rollplex.types import VideoClip

logger = logging.getLogger(__name__)

# Both families stack two frames into one temporal patch, and Qwen3-VL's resize refuses fewer.
MIN_FRAMES = 2


def sample_indices(total: int, source_fps: float, video_fps: float, max_frames: int) -> tuple[int, ...]:
    """Indices of the frames to keep: evenly spread over all `total` frames, `video_fps` a second, `max_frames` at most.

    Never more frames than the source has, except that a one-frame source gives its frame twice (a temporal patch
    holds two). `total` must be at least 1, rates positive.
    """
    if total == 1:
        return (0,) * MIN_FRAMES
    wanted = round(total / source_fps * video_fps)
    count = min(max(wanted, MIN_FRAMES), max_frames, total)
    # Start of each of `count` equal spans, so that the mean distance between kept frames is the sampled rate.
    return tuple(i * total // count for i in range(count))


def clip_from_frames(
    frames: np.ndarray | Sequence[Image.Image | np.ndarray],
    *,
    where: str,
    source: str,
    fps: float | None,
    video_fps: float,
    max_frames: int,
) -> VideoClip:
    """A clip from frames in memory: a uint8 array (T, H, W, 3) or a list of equally large PIL images or arrays.

    `fps` is the rate of the given frames; None means that they were already sampled at `video_fps`, then only
    `max_frames` thins them out. Raises MediaError (message starts with `where`).
    """
    array = _stack(frames, where)
    rate = video_fps if fps is None else _positive_rate(fps, where)
    return _sampled(array, rate, where=where, source=source, video_fps=video_fps, max_frames=max_frames)


def decode_video(source: Path | bytes, *, where: str, video_fps: float, max_frames: int) -> VideoClip:
    """Decode a video file or its bytes and sample it uniformly.

    Only kept frames are converted to RGB and held. The number of frames is taken from a first pass over the packets,
    not from the header, which streams often leave out or get wrong. Raises MediaError (message starts with `where`).
    """
    name = str(source) if isinstance(source, Path) else f"{len(source)} bytes"
    if isinstance(source, Path) and not source.is_file():
        raise MediaError(f"{where}: the video file {name} does not exist")
    try:
        total, rate = _probe(source, where, name)
        indices = sample_indices(total, rate, video_fps, max_frames)
        frames, decoded = _read_frames(source, frozenset(indices))
        if decoded != total:
            # Packets that hold no picture: the decoder knows better, so sample again from what it gave.
            logger.debug("%s: %s has %d packets and %d frames", where, name, total, decoded)
            total = decoded
            if total:
                indices = sample_indices(total, rate, video_fps, max_frames)
                frames, _ = _read_frames(source, frozenset(indices))
    except (av.FFmpegError, OSError, ValueError) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(f"{where}: the video {name} cannot be decoded ({error})") from error
    if not total:
        raise MediaError(f"{where}: the video {name} has zero frames, needed at least 1")
    array = np.stack([frames[i] for i in indices])
    return VideoClip(array, len(indices) / total * rate, indices, total, name, rate)


def _open(source: Path | bytes) -> av.container.InputContainer:
    return av.open(str(source) if isinstance(source, Path) else io.BytesIO(source), mode="r")


def _probe(source: Path | bytes, where: str, name: str) -> tuple[int, float]:
    """(number of video packets with data, frames per second)."""
    with _open(source) as container:
        if not container.streams.video:
            raise MediaError(f"{where}: {name} has no video stream")
        stream = container.streams.video[0]
        rate = stream.average_rate or stream.guessed_rate
        total = sum(1 for packet in container.demux(stream) if packet.size)
    if not rate and total:
        raise MediaError(f"{where}: the video {name} states no frame rate; give it as {{'frames': ..., 'fps': ...}}")
    return total, float(rate or 1)


def _read_frames(source: Path | bytes, keep: frozenset[int]) -> tuple[dict[int, np.ndarray], int]:
    """The frames at the indices in `keep` as RGB, and the number of frames decoded in all."""
    kept: dict[int, np.ndarray] = {}
    count = 0
    with _open(source) as container:
        for frame in container.decode(video=0):
            if count in keep:
                kept[count] = frame.to_ndarray(format="rgb24")
            count += 1
    return kept, count


def _stack(frames: np.ndarray | Sequence[Image.Image | np.ndarray], where: str) -> np.ndarray:
    if isinstance(frames, np.ndarray):
        array = frames
    else:
        if not len(frames):
            raise MediaError(f"{where}: the video has zero frames, needed at least 1")
        arrays = [_frame(frame, where, i) for i, frame in enumerate(frames)]
        sizes = sorted({a.shape[:2] for a in arrays})
        if len(sizes) > 1:
            found = ", ".join(f"{h}x{w}" for h, w in sizes)
            raise MediaError(f"{where}: frames of one video must have one size, found {found} (height x width)")
        array = np.stack(arrays)
    if array.ndim != 4 or array.shape[-1] != 3 or array.dtype != np.uint8:
        raise MediaError(
            f"{where}: a video array must be uint8 (frames, height, width, 3), found {array.dtype} {array.shape}"
        )
    if not array.shape[0]:
        raise MediaError(f"{where}: the video has zero frames, needed at least 1")
    if not array.shape[1] or not array.shape[2]:
        raise MediaError(f"{where}: the video's frames are empty, found {array.shape}")
    return array


def _frame(frame: Image.Image | np.ndarray, where: str, index: int) -> np.ndarray:
    if isinstance(frame, Image.Image):
        return np.asarray(frame.convert("RGB"))
    if isinstance(frame, np.ndarray) and frame.ndim == 3 and frame.shape[-1] == 3 and frame.dtype == np.uint8:
        return frame
    found = f"{frame.dtype} {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
    raise MediaError(f"{where}: frame {index} must be a PIL image or a uint8 (height, width, 3) array, found {found}")


def _positive_rate(fps: float, where: str) -> float:
    if isinstance(fps, bool) or not isinstance(fps, numbers.Real) or not math.isfinite(fps) or fps <= 0:
        raise MediaError(f"{where}: 'fps' must be a positive number, found {fps!r}")
    return float(fps)


def _sampled(
    array: np.ndarray, rate: float, *, where: str, source: str, video_fps: float, max_frames: int
) -> VideoClip:
    total = len(array)
    indices = sample_indices(total, rate, video_fps, max_frames)
    if indices == tuple(range(total)):
        return VideoClip(array, rate, indices, total, source, rate)
    return VideoClip(array[list(indices)], len(indices) / total * rate, indices, total, source, rate)
