"""From an image file to the pixels that a vision model reads: decode, turn upright, flatten onto white, resize in 8
bits like transformers' PIL backend (Gemma 4: bicubic, within the budget; Gemma 3: bilinear, one square). Every problem
with a file is a `ValueError` of one line.

Run as a script, this file is the sandbox process that decodes untrusted files (engine/images.py): it imports nothing
of this package; engine/child_process.py limits its memory and processor time.
"""

from __future__ import annotations

import io
import math
import re
import struct
import warnings

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
HEAD = struct.Struct("<IIQ")  # soft tokens and side, see `pixels`; maximum pixels; then the file
REPLY = struct.Struct("<?II")  # is it an image? its height and width; then pixels, or an error
# of the decoding process; the seconds for one image
MEMORY = 3 << 30
CPU_SECONDS = 20
MAX_SIDE = 65500
MAX_SCANS = 64  # of a JPEG; progressive ones have about ten
JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # of those with a segment, or the end


def target_size(height: int, width: int, tokens: int, side: int) -> tuple[int, int]:
    """Height and width in pixels after the resize: multiples of `side`, at most `tokens` of them in all."""
    factor = math.sqrt(tokens * side**2 / (height * width))
    tall, wide = (math.floor(factor * n / side) * side for n in (height, width))
    if not tall and not wide:
        raise ValueError(f"an image of {width} x {height} pixels cannot be resized")
    if not tall:
        return side, min(width // height * side, tokens * side)
    if not wide:
        return min(height // width * side, tokens * side), side
    return tall, wide


def jpeg_scans(data: bytes) -> int:
    """Up to the image's end: phones append films to their photographs, and segments hold previews."""
    at = 2
    num_scans = 0
    while (marker := JPEG_MARKER.search(data, at)) and marker[0] != b"\xff\xd9":
        num_scans += marker[0] == b"\xff\xda"
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return num_scans


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """A file's first frame. The header is read first, so that an image that is too large is never decoded."""
    if b"<svg" in data[:1024].lower() or data[:5] == b"<?xml":
        raise ValueError("SVG images are drawings, not pixels: send PNG, JPEG or WebP")
    scans = jpeg_scans(data) if data[:2] == b"\xff\xd8" else 0
    if scans > MAX_SCANS:  # each is a pass over all pixels
        raise ValueError(f"a JPEG of {scans} scans; at most {MAX_SCANS} are read")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            check_size(*image.size, max_pixels)
            image.load()
        except UnidentifiedImageError:
            raise ValueError(f"not an image that can be read here ({', '.join(FORMATS)})") from None
        except ValueError:
            raise
        except MemoryError:
            raise ValueError("the image takes too much memory to decode") from None
        except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error, ...
            why = " ".join(str(error).split())[:80] or type(error).__name__
            raise ValueError(f"the image is broken ({why})") from None
    return image


def check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1 or max(width, height) > MAX_SIDE:
        raise ValueError(f"an image of {width} x {height} pixels cannot be read")
    if width * height > max_pixels:
        raise ValueError(f"the image has {width} x {height} pixels; at most {max_pixels:,} are allowed")


def upright_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB, turned as its EXIF orientation says, transparent parts white."""
    try:
        image = ImageOps.exif_transpose(image)
    except Exception:  # a broken EXIF block: the pixels are there
        image = image.copy()
    if image.mode in ("I;16", "I;16B", "I;16L", "I"):  # 16 bits: Pillow's own conversion would cut at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    elif image.mode == "F":
        image = Image.fromarray(np.nan_to_num(np.asarray(image)).clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def pixels(image: Image.Image, tokens: int, side: int) -> np.ndarray:
    """uint8 [h, w, 3], as the vision model reads it. tokens 0: `side` x `side` pixels, whatever its aspect ratio."""
    image = upright_rgb(image)
    filter = Image.Resampling.BICUBIC if tokens else Image.Resampling.BILINEAR
    height, width = target_size(image.height, image.width, tokens, side=side) if tokens else (side, side)
    if (width, height) != image.size:
        image = image.resize((width, height), filter)
    return np.asarray(image)


# ---- the decoding process -----------------------------------------------------------------------------------------
def answer(request: bytes) -> bytes:
    """The reply to one frame: pixels, or a one-line error."""
    tokens, side, most = HEAD.unpack_from(request)
    try:
        result = pixels(decode(request[HEAD.size :], most), tokens, side)
        return REPLY.pack(True, *result.shape[:2]) + result.tobytes()
    except Exception as error:
        return REPLY.pack(False, 0, 0) + (" ".join(str(error).split())[:200] or type(error).__name__).encode()


if __name__ == "__main__":
    Image.MAX_IMAGE_PIXELS = None  # `check_size` has its own bound
    Image.init()
