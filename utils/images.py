"""Image files of any kind as RGB tensors; the one place where scripts decode photographs.

A file that cannot be used is a BadImage with the reason in one line, whatever Pillow raises. The
size is read from the header and checked before anything is decoded. Only formats that are plain
data are opened: PostScript, say, which Pillow would hand to another program, is refused.
"""

import functools
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torchvision.io import decode_jpeg

# About 134 million pixels, 400 MB in RGB: more than cameras make, less than a worker's memory.
MAX_PIXELS = 2**27
FORMATS = "JPEG PNG WEBP GIF TIFF BMP PPM JPEG2000 AVIF".split()
# A sensor's values, stored in 16 bits, fill one of these ranges: 255, 1023, ... is white.
BIT_DEPTHS = (8, 10, 12, 14, 16)


class BadImage(ValueError):
    """A file that is no image, a broken one, or one too large; the message is one line."""


def open_checked(source: Path | bytes, name: str) -> Image.Image:
    """The image as it is stored, in its own mode, its first frame decoded; size checked before.

    For what must not pass through RGB, such as masks: `with open_checked(...) as image`.

    Args:
        source: the file, or its content.
        name: of the file, for the message.

    Raises BadImage. An error of the disk or network is an OSError: the file may be good.
    """
    with _explained(name):
        image = _open(source if isinstance(source, bytes) else source.read_bytes(), name)
        image.load()
        return image


def decode_rgb(source: Path | bytes, name: str) -> torch.Tensor:
    """An image upright in RGB: uint8 (3, H, W), H and W as it is seen.

    Orientation from EXIF is applied. Grey, palette and CMYK (Adobe's inverted too) are converted,
    more than 8 bits scaled. Transparent parts become white, as on a page: the colour stored under
    them is anything, black mostly, and alpha that is dropped would show it.

    Args and errors: as `open_checked`.
    """
    with _explained(name):
        content = source if isinstance(source, bytes) else source.read_bytes()
        image = _open(content, name)
        if image.format == "JPEG" and image.mode == "RGB" and _orientation(image) == 1:
            try:  # the same pixels in half of the time
                data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                return decode_jpeg(data)  # type: ignore[return-value]
            except RuntimeError:  # what Pillow says to it counts
                pass
        image.load()
        if _orientation(image) != 1:
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode[0] in "IF":
            image = _eight_bits(image)
        if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        if image.mode != "RGB":  # a plain photograph is used as it is
            image = image.convert("RGB")
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn whatever is raised over a file's content into a BadImage; Pillow's warnings are dropped
    (of sizes, which are checked here, and of metadata, which training does not need)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # of many kinds: SyntaxError, struct.error, EOFError, ...
        gone = isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError))
        if isinstance(error, OSError) and error.errno is not None and not gone:
            raise  # of the disk: another attempt may find the file good
        reason = error.strerror if gone and isinstance(error, OSError) else str(error)
        if isinstance(error, Image.UnidentifiedImageError):
            reason = f"no image, or none of these formats: {', '.join(_formats())}"
        reason = " ".join(str(reason).split()).rstrip(".") or type(error).__name__
        raise BadImage(f"{name}: {reason}") from error


@functools.cache
def _formats() -> list[str]:
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _open(content: bytes, name: str) -> Image.Image:
    """The image, nothing but its header read; its size is checked."""
    image = Image.open(io.BytesIO(content), formats=_formats())
    if image.width * image.height > MAX_PIXELS:
        size = f"{image.width}x{image.height}"
        raise BadImage(f"{name}: {size} pixels, more than {MAX_PIXELS:,} are not decoded")
    return image


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # of broken metadata, which says nothing about the pixels
        return 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 or 32 bits, or of floats, as 8 bits; Pillow's own conversion clips to white."""
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("values that are not finite")
    low, high = 0.0, values.max(initial=0.0)
    if image.mode[0] == "F" and high <= 1:
        high = 1.0
    elif values.min() >= 0 and high < 2 ** BIT_DEPTHS[-1]:
        high = next(2.0**bits - 1 for bits in BIT_DEPTHS if high < 2**bits)
    else:  # nothing tells what is black or white
        low = values.min()
    scaled = (values - low) * (255 / max(high - low, 1e-300))
    return Image.fromarray(scaled.round().clip(0, 255).astype(np.uint8))
