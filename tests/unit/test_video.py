"""Which frames are kept, and that decoding finds exactly those."""

from __future__ import annotations

from itertools import pairwise

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.errors import MediaError
from rollplex.vision.video import clip_from_frames, decode_video, sample_indices


def write_video(path, frames, rate, codec="mpeg4", **options):
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        container.start_encoding()
        for i in range(frames):
            array = np.full((32, 48, 3), 10 + 8 * i, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
        container.mux(stream.encode())


@given(st.integers(1, 5000), st.floats(0.1, 120), st.floats(0.1, 60), st.integers(2, 256))
def test_sampled_frames_are_in_range_ordered_and_bounded(total, source_fps, video_fps, most):
    indices = sample_indices(total, source_fps, video_fps, most)
    assert 2 <= len(indices) <= max(2, min(most, max(total, 2)))
    assert all(0 <= i < total for i in indices)
    if total > 1:
        assert all(a < b for a, b in pairwise(indices))
        gaps = np.diff(indices)
        assert gaps.max() - gaps.min() <= 1  # uniform


def test_sampling_rate_and_cap():
    assert sample_indices(96, 24.0, 2.0, 64) == (0, 12, 24, 36, 48, 60, 72, 84)
    assert sample_indices(96, 24.0, 2.0, 4) == (0, 24, 48, 72)
    assert sample_indices(5, 1.0, 2.0, 64) == (0, 1, 2, 3, 4)  # never more than there are
    assert sample_indices(1, 24.0, 2.0, 64) == (0, 0)


@pytest.mark.parametrize("form", ["path", "bytes"])
def test_decoded_frames_are_the_sampled_ones(form, tmp_path):
    file = tmp_path / "a.mp4"
    write_video(file, frames=24, rate=8)
    source = file if form == "path" else file.read_bytes()
    clip = decode_video(source, where="row 0: videos[0]", video_fps=2.0, max_frames=64)
    assert clip.frame_indices == (0, 4, 8, 12, 16, 20)
    assert (clip.fps, clip.source_fps, clip.total_frames) == (2.0, 8.0, 24)
    grey = clip.frames.mean(axis=(1, 2, 3))
    assert np.allclose(grey, [10 + 8 * i for i in clip.frame_indices], atol=4)


def test_zero_frame_video_is_refused(tmp_path):
    file = tmp_path / "none.avi"
    write_video(file, frames=0, rate=8)
    with pytest.raises(MediaError, match=r"^row 3: videos\[0\]: .* has zero frames, needed at least 1"):
        decode_video(file, where="row 3: videos[0]", video_fps=2.0, max_frames=8)


def test_audio_only_file_is_refused(tmp_path):
    file = tmp_path / "a.wav"
    with av.open(str(file), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(MediaError, match="has no video stream"):
        decode_video(file, where="row 3: videos[0]", video_fps=2.0, max_frames=8)


def test_cut_and_missing_files_are_refused(tmp_path):
    file = tmp_path / "a.mp4"
    write_video(file, frames=12, rate=8)
    with pytest.raises(MediaError, match=r"^row 1: v: .*(cannot be decoded|no video stream)"):
        decode_video(file.read_bytes()[: file.stat().st_size // 2], where="row 1: v", video_fps=2.0, max_frames=8)
    with pytest.raises(MediaError, match=r"^row 1: .*gone\.mp4 does not exist"):
        decode_video(tmp_path / "gone.mp4", where="row 1: v", video_fps=2.0, max_frames=8)


def test_frames_without_a_rate_count_as_sampled():
    frames = np.arange(5, dtype=np.uint8)[:, None, None, None].repeat(4, 1).repeat(4, 2).repeat(3, 3)
    options = {"where": "row 0: v", "source": "s", "video_fps": 2.0}
    kept = clip_from_frames(frames, fps=None, max_frames=64, **options)
    assert kept.fps == 2.0 and len(kept.frames) == 5
    thinned = clip_from_frames(frames, fps=None, max_frames=2, **options)
    assert thinned.frame_indices == (0, 2) and thinned.frames[1, 0, 0, 0] == 2
    single = clip_from_frames(frames[:1], fps=None, max_frames=64, **options)
    assert single.frame_indices == (0, 0) and len(single.frames) == 2


@pytest.mark.parametrize(
    "bad", [np.zeros((3, 4, 4, 3)), np.zeros((4, 4, 3), np.uint8), np.zeros((2, 0, 4, 3), np.uint8)]
)
def test_wrong_arrays_are_refused(bad):
    with pytest.raises(MediaError, match="^row 0: v: "):
        clip_from_frames(bad, where="row 0: v", source="s", fps=None, video_fps=2.0, max_frames=8)
