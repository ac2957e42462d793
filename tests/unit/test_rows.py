"""Rows to Examples: every accepted form, every refusal with the row's number."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rollplex.errors import MediaError, RowError
from rollplex.tasks.rows import example_from_row, row_from_verl


def read(row, index=7, base_dir=None):
    return example_from_row(index, row, video_fps=2.0, max_frames=8, base_dir=base_dir)


def picture(side=20, colour=(200, 10, 30)):
    return Image.new("RGB", (side, side), colour)


def encoded(image, kind="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


IMAGE, VIDEO, TEXT = {"type": "image"}, {"type": "video"}, {"type": "text", "text": "What is it?"}


def write_video(path, frames=6, rate=3):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for i in range(frames):
            array = np.full((32, 32, 3), 40 * i, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
        container.mux(stream.encode())


@pytest.mark.parametrize("form", ["pil", "path", "str", "bytes", "dict_bytes", "dict_path", "array", "relative"])
def test_every_image_form_gives_the_same_rgb_picture(form, tmp_path):
    image = picture()
    file = tmp_path / "a.png"
    file.write_bytes(encoded(image))
    value = {
        "pil": image,
        "path": file,
        "str": str(file),
        "bytes": encoded(image),
        "dict_bytes": {"bytes": encoded(image), "path": "gone.png"},
        "dict_path": {"bytes": None, "path": str(file)},
        "array": np.asarray(image),
        "relative": "a.png",
    }[form]
    example = read({"prompt": user(IMAGE, TEXT), "images": [value]}, base_dir=tmp_path)
    assert example.images[0].mode == "RGB"
    assert np.array_equal(np.asarray(example.images[0]), np.asarray(image))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "LA"])
def test_every_8_bit_mode_becomes_rgb(mode):
    assert read({"prompt": user(IMAGE), "image": picture().convert(mode)}).images[0].mode == "RGB"


def test_16_bit_image_is_refused_not_clipped():
    deep = Image.fromarray(np.full((4, 4), 40_000, np.uint16))
    with pytest.raises(MediaError, match=r"row 7: images\[0\]: pixel mode I;16"):
        read({"prompt": user(IMAGE), "image": deep})


def test_exif_rotation_is_applied():
    image = Image.new("RGB", (10, 20))
    exif = image.getexif()
    exif[0x0112] = 6  # rotated by 90 degrees
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    assert read({"prompt": user(IMAGE), "image": buffer.getvalue()}).images[0].size == (20, 10)


@pytest.mark.parametrize(
    "form", ["path", "bytes", "dict", "pil_frames", "array_frames", "array", "frames_fps", "files"]
)
def test_every_video_form_gives_a_clip(form, tmp_path):
    file = tmp_path / "v.mp4"
    write_video(file)
    arrays = [np.full((32, 32, 3), 40 * i, np.uint8) for i in range(6)]
    (tmp_path / "f.png").write_bytes(encoded(picture(32)))
    value = {
        "path": "v.mp4",
        "bytes": file.read_bytes(),
        "dict": {"bytes": file.read_bytes(), "path": None},
        "pil_frames": [Image.fromarray(a) for a in arrays],
        "array_frames": arrays,
        "array": np.stack(arrays),
        "frames_fps": {"frames": arrays, "fps": 3.0},
        "files": ["f.png"] * 6,
    }[form]
    clip = read({"prompt": user(VIDEO, TEXT), "videos": [value]}, base_dir=tmp_path).videos[0]
    # With a known rate of 3 frames a second, 2 s of source give 4 frames; frames without a rate are all kept.
    expected = 4 if form in ("path", "bytes", "dict", "frames_fps") else 6
    assert clip.frames.shape == (expected, 32, 32, 3) and clip.frames.dtype == np.uint8
    assert clip.total_frames == 6 and len(clip.frame_indices) == expected
    assert clip.fps == pytest.approx(2.0)


def test_media_and_columns_keep_their_order():
    images = [picture(20, (i * 40, 0, 0)) for i in range(4)]
    row = {"prompt": user(IMAGE, TEXT, IMAGE, IMAGE, IMAGE), "images": images, "answer": "3", "boxes": [[1, 2]]}
    example = read(row)
    assert [image.getpixel((0, 0))[0] for image in example.images] == [0, 40, 80, 120]
    assert dict(example.columns) == {"answer": "3", "boxes": [[1, 2]]}


def test_plain_chat_gets_placeholders_before_the_first_user_text():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."}]
    chat += [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Now?"}]
    example = read({"prompt": chat, "images": [picture(), picture()], "video": [picture(), picture()]})
    assert example.prompt[0] == {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert example.prompt[1]["content"] == [IMAGE, IMAGE, VIDEO, {"type": "text", "text": "Look."}]
    assert example.prompt[3]["content"] == [{"type": "text", "text": "Now?"}]
    assert chat[1]["content"] == "Look."  # the row itself is untouched


def test_plain_chat_equals_trl():
    from trl.data_utils import prepare_multimodal_messages

    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."}]
    images = [picture(), picture()]
    theirs = prepare_multimodal_messages(chat, images=images)
    for message in theirs:
        for part in message["content"]:
            part.pop("image", None)
    assert read({"prompt": chat, "images": images}).prompt == theirs


@pytest.mark.parametrize("empty", [{}, {"images": []}, {"images": None, "videos": []}])
def test_text_only_rows(empty):
    chat = [{"role": "user", "content": "2 + 2?"}]
    assert read({"prompt": chat, **empty}).prompt == chat
    assert read({"prompt": "2 + 2 =", **empty}).prompt == "2 + 2 ="


def test_arrow_nulls_in_parts_and_messages_are_dropped():
    part = {"type": "text", "text": "Hi", "image": None}
    row = {"prompt": [{"role": "user", "content": [{"type": "image", "text": None}, part], "name": None}]}
    example = read({**row, "images": [picture()]})
    assert example.prompt == [{"role": "user", "content": [IMAGE, {"type": "text", "text": "Hi"}]}]


BAD = [
    ({"answer": "x"}, r"no column 'prompt'"),
    ({"prompt": None}, r"no column 'prompt'"),
    ({"prompt": []}, r"empty chat"),
    ({"prompt": ""}, r"empty string"),
    ({"prompt": 3}, r"must be chat messages or a string, found int"),
    ({"prompt": ["hi"]}, r"prompt\[0\] must be a message"),
    ({"prompt": [{"role": "wizard", "content": "x"}]}, r"role 'wizard'"),
    ({"prompt": [{"role": "user"}]}, r"needs 'content'"),
    ({"prompt": user({"type": "audio"})}, r"prompt\[0\]\.content\[0\].*text, image or video"),
    ({"prompt": user({"type": "text"})}, r"'text' as a string"),
    ({"prompt": user({"type": "image", "image": "a.png"})}, r"carries \['image'\].*column 'images'"),
    ({"prompt": user(IMAGE)}, r"1 image placeholders but the row has 0 images"),
    ({"prompt": user(IMAGE, IMAGE), "image": picture()}, r"2 image placeholders but the row has 1 images"),
    ({"prompt": user(TEXT), "image": picture()}, r"0 image placeholders but the row has 1 images"),
    ({"prompt": user(VIDEO, VIDEO), "video": [picture()] * 2}, r"2 video placeholders but the row has 1 videos"),
    ({"prompt": [{"role": "system", "content": "x"}], "image": picture()}, r"no user message"),
    ({"prompt": "plain", "image": picture()}, r"plain string prompt is text only, found 1 images"),
    ({"prompt": user(IMAGE), "images": picture()}, r"'images' must be a list, found Image; a single image goes into"),
    ({"prompt": user(IMAGE), "images": [picture()], "image": picture()}, r"both columns 'image' and 'images'"),
    ({"prompt": user(IMAGE), "images": [5]}, r"images\[0\]: found int"),
    ({"prompt": user(IMAGE), "images": [None]}, r"images\[0\]: found NoneType"),
    ({"prompt": user(IMAGE), "images": [{"bytes": None, "path": None}]}, r"images\[0\]: found NoneType"),
    ({"prompt": user(IMAGE), "images": ["gone.png"]}, r"images\[0\]: the file gone\.png does not exist"),
    ({"prompt": user(IMAGE), "images": ["https://x.org/a.png"]}, r"is an address; nothing is downloaded"),
    ({"prompt": user(IMAGE), "images": [np.zeros((4, 4, 3))]}, r"must be uint8 .*, found float64 \(4, 4, 3\)"),
    ({"prompt": user(IMAGE), "images": [np.zeros((0, 4, 3), np.uint8)]}, r"found uint8 \(0, 4, 3\)"),
    ({"prompt": user(VIDEO), "videos": [[]]}, r"videos\[0\]: the video has zero frames"),
    ({"prompt": user(VIDEO), "videos": [np.zeros((0, 8, 8, 3), np.uint8)]}, r"videos\[0\]: the video has zero frames"),
    ({"prompt": user(VIDEO), "videos": [{"frames": [picture()], "fps": 0}]}, r"'fps' must be a positive number"),
    ({"prompt": user(VIDEO), "videos": [[picture(8), picture(9)]]}, r"one size, found 8x8, 9x9"),
    ({"prompt": user(VIDEO), "videos": ["gone.mp4"]}, r"videos\[0\]: the file gone\.mp4 does not exist"),
    ({"prompt": user(VIDEO), "videos": [b"junk"]}, r"videos\[0\]: the video 4 bytes cannot be decoded"),
]


@pytest.mark.parametrize(("row", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_rows_name_the_row(row, message):
    with pytest.raises(RowError, match=rf"^row 7: (.*){message}") as caught:
        read(row)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_truncated_image_is_refused_however_it_is_cut(kind):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8))
    data = encoded(noise, kind)
    for keep in (0, 3, 20, len(data) // 2):
        with pytest.raises(MediaError, match=r"^row 7: images\[0\]: the image cannot be read"):
            read({"prompt": user(IMAGE), "images": [data[:keep]]})


@given(st.binary(max_size=200))
def test_random_bytes_never_escape_as_another_error(data):
    with pytest.raises(MediaError, match="^row 7: "):
        read({"prompt": user(IMAGE), "images": [data]})


JUNK = st.sampled_from(
    [None, 3, "", "text", [], {}, {"type": ["image"]}, {"type": "image", "x": 1}, True, b"junk", 1.5]
)
PART = st.sampled_from([IMAGE, VIDEO, TEXT]) | JUNK
CONTENT = (
    st.lists(st.sampled_from([IMAGE, VIDEO, TEXT]), max_size=3) | st.just("Hi") | st.lists(PART, max_size=2) | JUNK
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "x", None]), "content": CONTENT}
)
GOOD_OR_JUNK = st.just(picture(8)) | JUNK
MEDIA = st.lists(st.just(picture(8)), max_size=2) | st.lists(GOOD_OR_JUNK, max_size=2) | JUNK
ROW = st.fixed_dictionaries(
    {"prompt": st.lists(MESSAGE, max_size=2) | JUNK},
    optional={"images": MEDIA, "image": GOOD_OR_JUNK, "videos": MEDIA, "video": MEDIA},
)


@settings(max_examples=300)
@given(ROW)
def test_any_row_is_an_example_with_matching_placeholders_or_a_row_error(row):
    try:
        example = read(row)
    except RowError as error:
        assert str(error).startswith("row 7: ")
        return
    messages = [] if isinstance(example.prompt, str) else example.prompt
    kinds = [part["type"] for m in messages if isinstance(m["content"], list) for part in m["content"]]
    assert (kinds.count("image"), kinds.count("video")) == (len(example.images), len(example.videos))


def test_verl_row_with_tags():
    row = {
        "data_source": "geo",
        "prompt": [{"role": "user", "content": "<image>Compare with <image>, then <video>."}],
        "images": [{"bytes": encoded(picture())}, picture()],
        "videos": [[picture(), picture()]],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train"},
    }
    example = read(row_from_verl(7, row))
    kinds = [part.get("text", part["type"]) for part in example.prompt[0]["content"]]
    assert kinds == ["image", "Compare with ", "image", ", then ", "video", "."]
    assert example.columns["ground_truth"] == example.columns["solution"] == "4"
    assert example.columns["data_source"] == "geo"


def test_verl_tag_count_must_match():
    row = {"prompt": [{"role": "user", "content": "<image><image> x"}], "reward_model": {"ground_truth": 1}}
    with pytest.raises(RowError, match="^row 7: the prompt has 2 image placeholders but the row has 1 images"):
        read(row_from_verl(7, {**row, "images": [picture()]}))
    with pytest.raises(RowError, match="^row 3: a verl row needs reward_model"):
        row_from_verl(3, {"prompt": [], "reward_model": {}})


def test_g30_rewards_see_the_pictures_in_original_size_and_order():
    def area_reward(completions, images, **_):
        return [float(picture.width * picture.height) for pictures in images for picture in pictures[:1]]

    example = read({"prompt": user(IMAGE, IMAGE), "images": [picture(31), picture(17)]})
    assert area_reward(["a"], images=[list(example.images)]) == [31.0 * 31.0]
    assert [image.size for image in example.images] == [(31, 31), (17, 17)]


def test_g30_media_of_a_first_turn_stay_in_later_turns():
    chat = [*user(IMAGE, TEXT), {"role": "assistant", "content": "A cat."}, *user({"type": "text", "text": "Sure?"})]
    example = read({"prompt": chat, "images": [picture()]})
    assert sum(p == IMAGE for m in example.prompt for p in m["content"]) == len(example.images) == 1


def test_relative_paths_need_no_working_directory(tmp_path: Path):
    (tmp_path / "pics").mkdir()
    (tmp_path / "pics" / "a.png").write_bytes(encoded(picture()))
    row = {"prompt": user(IMAGE), "images": ["pics/a.png"]}
    assert read(row, base_dir=tmp_path).images[0].size == (20, 20)
    with pytest.raises(MediaError, match="does not exist"):
        read(row)
