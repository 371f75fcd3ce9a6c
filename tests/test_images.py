"""Image files of any kind, decoded to RGB: pixel values against what was drawn into them."""

import io
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from utils import images
from utils.images import BadImage, decode_rgb, open_checked

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
# What the files of awkward/ are: shape, or the words of the reason why not.
AWKWARD = {
    "animated.gif": (3, 240, 320),
    "bomb_header.gif": r"Image size \(4364696535 pixels\) exceeds limit",
    "cmyk_adobe.jpg": (3, 100, 100),
    "exif_orientation_6.jpg": (3, 128, 128),
    "gray.jpg": (3, 128, 128),
    "gray16.tif": (3, 64, 64),
    "gray_alpha.png": (3, 128, 128),
    "junk_header.jpg": (3, 768, 1024),
    "one_pixel_trns.png": (3, 1, 1),
    "palette_trns.png": (3, 150, 162),
    "plain.webp": (3, 128, 128),
    "rgba.png": (3, 150, 200),
    "text_bomb.png": "Decompressed data too large",
    "text_named_jpg.jpg": "no image",
    "truncated.png": "truncated",
    "truncated_progressive.jpg": "truncated",
    "webp_named_jpg.jpg": (3, 128, 128),
    "zero_bytes.jpg": "no image",
}


def encode(image: Image.Image, kind: str = "PNG", **how) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def raise_(error: Exception):
    raise error


def corners() -> Image.Image:
    """4 x 2 pixels: red above blue at the left, all else green."""
    image = Image.new("RGB", (4, 2), GREEN)
    image.putpixel((0, 0), RED)
    image.putpixel((0, 1), BLUE)
    return image


def pixel(image: torch.Tensor, row: int, column: int) -> tuple[int, ...]:
    return tuple(image[:, row, column].tolist())


def test_plain_image_is_as_pillow_reads_it():
    pixels = np.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=np.uint8)
    for kind in ("PNG", "JPEG", "BMP"):
        data = encode(Image.fromarray(pixels), kind)
        expected = np.asarray(Image.open(io.BytesIO(data))).transpose(2, 0, 1)
        found = decode_rgb(data, "x")
        assert found.dtype == torch.uint8 and found.shape == (3, 48, 32)
        assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_fast_path_gives_the_same_pixels(monkeypatch, subsampling, progressive):
    rows = np.arange(99)[:, None, None] * np.array([1, 2, 5]) + np.arange(75)[None, :, None] * 3
    image = Image.fromarray((rows % 256).astype(np.uint8))
    data = encode(image, "JPEG", subsampling=subsampling, progressive=progressive)
    fast = decode_rgb(data, "x")
    monkeypatch.setattr(images, "decode_jpeg", lambda data: raise_(RuntimeError()))
    assert torch.equal(decode_rgb(data, "x"), fast)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize(
    ("orientation", "red", "blue"),  # where the two corners are seen
    [
        (1, (0, 0), (1, 0)), (2, (0, 3), (1, 3)), (3, (1, 3), (0, 3)), (4, (1, 0), (0, 0)),
        (5, (0, 0), (0, 1)), (6, (0, 1), (0, 0)), (7, (3, 1), (3, 0)), (8, (3, 0), (3, 1)),
    ],
)  # fmt: skip
def test_orientation_is_applied_once(kind, orientation, red, blue):
    exif = Image.Exif()
    exif[0x0112] = orientation
    how = {"WEBP": {"lossless": True}, "JPEG": {"subsampling": 0, "quality": 95}}.get(kind, {})
    large = corners().resize((64, 32), Image.Resampling.NEAREST)  # blocks of 16, as JPEG has
    found = decode_rgb(encode(large, kind, exif=exif, **how), "x")
    assert found.shape == ((3, 32, 64) if orientation < 5 else (3, 64, 32))
    found = found[:, 8::16, 8::16]
    for place, colour in ((red, RED), (blue, BLUE)):
        assert np.abs(np.subtract(pixel(found, *place), colour)).max() < 8


def test_broken_metadata_leaves_the_pixels():
    data = encode(corners(), "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12")
    assert pixel(decode_rgb(data, "x"), 0, 0) == RED


def test_cmyk_is_not_inverted():
    ink = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # magenta and yellow: red
    found = decode_rgb(encode(ink, "JPEG", quality=95), "x")
    assert found[0].min() > 240 and found[1:].max() < 15
    assert decode_rgb(encode(Image.new("CMYK", (16, 16)), "JPEG"), "x").min() > 240  # no ink


@pytest.mark.parametrize(
    ("largest", "white"), [(255, 255), (700, 1023), (4000, 4095), (9000, 16383), (65535, 65535)]
)
def test_16_bit_grey_keeps_its_range(largest, white):
    values = np.linspace(0, largest, 64).astype(np.uint16).reshape(8, 8)
    for kind in ("PNG", "TIFF"):
        found = decode_rgb(encode(Image.fromarray(values), kind), "x")
        assert np.array_equal(found[0], found[2])
        assert np.abs(found[0].numpy() - values * (255 / white)).max() <= 0.5
        assert (found[0].diff(dim=1) >= 0).all()


def test_grey_of_32_bits():
    values = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    found = decode_rgb(encode(Image.fromarray(values), "TIFF"), "x")
    assert np.abs(found[0].numpy() - values * 255).max() <= 0.5
    wide = Image.fromarray((values * 2e9 - 1e9).astype(np.int32))
    found = decode_rgb(encode(wide, "TIFF"), "x")
    assert (found.min(), found.max()) == (0, 255)
    values[3, 3] = np.nan
    with pytest.raises(BadImage, match="not finite"):
        decode_rgb(encode(Image.fromarray(values), "TIFF"), "x")


def test_transparent_parts_become_white():
    half = (100, 0, 0, 128)
    for image, expected in [
        (Image.new("RGBA", (2, 2), (0, 0, 0, 0)), WHITE),
        (Image.new("RGBA", (2, 2), (10, 20, 30, 255)), (10, 20, 30)),
        (Image.new("RGBA", (2, 2), half), (177, 127, 127)),
        (Image.new("LA", (2, 2), (0, 0)), WHITE),
        (Image.new("LA", (2, 2), (77, 255)), (77, 77, 77)),
    ]:
        assert pixel(decode_rgb(encode(image), "x"), 0, 0) == expected
    palette = Image.new("P", (2, 1))
    palette.putpalette([*RED, *BLUE])
    palette.putpixel((1, 0), 1)
    assert pixel(decode_rgb(encode(palette), "x"), 0, 1) == BLUE
    found = decode_rgb(encode(palette, transparency=1), "x")
    assert pixel(found, 0, 0) == RED and pixel(found, 0, 1) == WHITE


def test_bilevel_and_grey():
    for mode in ("1", "L"):
        found = decode_rgb(encode(Image.new(mode, (3, 2), 1 if mode == "1" else 255)), "x")
        assert found.shape == (3, 2, 3) and pixel(found, 1, 2) == WHITE


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
def test_cut_short_anywhere_is_one_line(kind):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    data = encode(Image.fromarray(pixels), kind)
    for size in (0, 1, 7, 20, 60, len(data) // 4, len(data) // 2, len(data) * 3 // 4):
        with pytest.raises(BadImage, match=r"\Asome/file: .+\Z"):
            decode_rgb(data[:size], "some/file")


def test_a_large_image_is_refused_by_its_header(monkeypatch):
    data = encode(corners())
    assert decode_rgb(data, "x").shape == (3, 2, 4)
    monkeypatch.setattr(images, "MAX_PIXELS", 7)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(BadImage, match="x: 4x2 pixels, more than 7"):
        decode_rgb(data, "x")


def test_postscript_is_not_executed():
    data = encode(corners(), "EPS")
    with pytest.raises(BadImage, match="no image"):
        decode_rgb(data, "x")


def test_a_missing_file_is_bad_a_failing_disk_is_not(tmp_path):
    with pytest.raises(BadImage, match="a.jpg: No such file"):
        decode_rgb(tmp_path / "a.jpg", "a.jpg")

    class Failing(type(tmp_path)):
        def read_bytes(self):
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output") as caught:
        decode_rgb(Failing(tmp_path), "a.jpg")
    assert not isinstance(caught.value, BadImage)


def test_masks_keep_their_numbers():
    mask = Image.fromarray(np.array([[0, 3], [11, 255]], dtype=np.uint8))
    mask = mask.convert("P")
    mask.putpalette([1, 2, 3] * 256)
    with open_checked(encode(mask), "x") as image:
        assert image.mode == "P"
        assert np.asarray(image).tolist() == [[0, 3], [11, 255]]


def test_awkward_files(real_data, tmp_path):
    folder = real_data / "awkward"
    names = {entry["file"] for entry in json.loads((folder / "manifest.json").read_text())["files"]}
    assert names == AWKWARD.keys()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, expected in AWKWARD.items():
            if isinstance(expected, str):
                with pytest.raises(BadImage, match=f"{name}: .*{expected}"):
                    decode_rgb(folder / name, name)
            else:
                found[name] = decode_rgb(folder / name, name)
                assert found[name].shape == expected, name
    assert 60 < found["gray16.tif"].double().mean() < 200
    plain = found["plain.webp"].double()  # the picture of which others are variants
    turned = found["exif_orientation_6.jpg"].double()
    assert (turned - plain).abs().mean() < 20 < (turned.rot90(1, (1, 2)) - plain).abs().mean()
    grey = (found["gray.jpg"].double() - plain.mean(0)).abs().mean()
    assert grey < 20
    path = Path(shutil.copy(folder / "plain.webp", tmp_path))
    assert torch.equal(decode_rgb(path.read_bytes(), "x"), found["plain.webp"])
