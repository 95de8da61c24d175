"""Hostile and odd image files: the right picture, or one line that says what is wrong; never a crash or a hang."""

from __future__ import annotations

import io
import os
import resource
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.waiting import PATIENCE

from outrider.engine import child_process
from outrider.engine.child_process import QUICK_S, stand_back
from outrider.engine.images import DECODE_SECONDS, MAX_BYTES, DecodingProcess, ImageDecoder, ImageEncoder
from outrider.engine.media import read_file
from outrider.models.image_processing import CPU_SECONDS, pixels
from outrider.types import OutriderError

TOKENS = 70
SIDE = 12
Maker = Callable[[], bytes]


def noise(mode: str = "RGB", size: tuple[int, int] = (40, 24)) -> Image.Image:
    values = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


def saved(image: Image.Image, kind: str, **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, bits: int = 8, colour: int = 2, body: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def sixteen_bits() -> bytes:
    rows = b"".join(b"\0" + struct.pack(">40H", *[60000] * 40) for _ in range(24))
    return png(40, 24, 16, 0, rows)


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(noise(), "JPEG", exif=exif)


def scans(times: int, side: int = 40) -> bytes:
    """A progressive JPEG whose last scan comes many times: a few bytes, and a pass over all pixels for each."""
    data = saved(Image.new("RGB", (side, side)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    end = data.rindex(b"\xff\xd9")
    return data[:last] + data[last:end] * times + data[end:]


PNG = saved(noise(), "PNG")
JPEG = saved(noise(), "JPEG")
GOOD: dict[str, Maker] = {
    "png": lambda: PNG,
    "jpeg": lambda: JPEG,
    "webp": lambda: saved(noise(), "WEBP"),
    "gif": lambda: saved(noise("P"), "GIF"),
    "bmp": lambda: saved(noise(), "BMP"),
    "tiff": lambda: saved(noise(), "TIFF"),
    "ppm": lambda: saved(noise(), "PPM"),
    "grey": lambda: saved(noise("L"), "PNG"),
    "one bit": lambda: saved(noise("1"), "PNG"),
    "palette": lambda: saved(noise("P"), "PNG"),
    "alpha": lambda: saved(noise("RGBA"), "PNG"),
    "grey alpha": lambda: saved(noise("LA"), "PNG"),
    "cmyk": lambda: saved(noise("CMYK"), "JPEG"),
    "sixteen bits": sixteen_bits,
    "thirty-two bits": lambda: saved(Image.fromarray(np.full((24, 40), 40000, np.int32)), "TIFF"),
    "floats": lambda: saved(Image.fromarray(np.full((24, 40), np.nan, np.float32)), "TIFF"),
    "progressive": lambda: saved(noise(), "JPEG", progressive=True),
    "rotated": rotated,
    "broken exif": lambda: saved(noise(), "JPEG", exif=b"Exif\0\0garbage"),
    "animated gif": lambda: saved(noise("P"), "GIF", save_all=True, append_images=[noise("P")] * 3),
    "animated webp": lambda: saved(noise(), "WEBP", save_all=True, append_images=[noise()] * 3),
    "transparent colour": lambda: saved(noise("P"), "PNG", transparency=0),
    "one pixel": lambda: saved(noise(size=(1, 1)), "PNG"),
    "a line": lambda: saved(noise(size=(3000, 1)), "PNG"),
    "trailing bytes": lambda: PNG + b"\0" * 1000,
    "film after a jpeg": lambda: JPEG + b"ftypmp42" + b"\xff\xda" * 100,
    "preview in a jpeg": lambda: JPEG[:2] + b"\xff\xe2" + struct.pack(">H", 202) + b"\xff\xda" * 100 + JPEG[2:],
}
BAD: dict[str, tuple[Maker, str]] = {
    "nothing": (lambda: b"", "empty"),
    "text": (lambda: b"hello", "not an image"),
    "zeros": (lambda: b"\0" * 5000, "not an image"),
    "svg": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
    "xml svg": (lambda: b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><svg/>', "SVG"),
    "pdf": (lambda: b"%PDF-1.7\n", "not an image"),
    "html": (lambda: b"<html><script>", "not an image"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    "zip": (lambda: b"PK\3\4" + b"\0" * 60, "not an image"),
    "cut png": (lambda: PNG[: len(PNG) // 2], "broken"),
    "cut jpeg": (lambda: JPEG[: len(JPEG) // 2], "broken"),
    "head only": (lambda: PNG[:33], ""),
    "signature only": (lambda: PNG[:8], ""),
    "bomb by header": (lambda: png(60000, 60000), "pixels"),
    "bomb by content": (lambda: png(9000, 9000, body=b"\0" * 27_009_000), "pixels"),
    "very wide": (lambda: png(2**31 - 1, 1), "pixels"),
    "no width": (lambda: png(0, 10), ""),
    "wrong checksum": (lambda: PNG[:50] + bytes([PNG[50] ^ 255]) + PNG[51:], ""),
    "no data": (lambda: png(10, 10), "broken"),
    "jpeg of a thousand scans": (lambda: scans(1000), "1009 scans"),
    "filled scans": (lambda: scans(1000).replace(b"\xff\xda", b"\xff\x01\xff\xff\xda"), "1009 scans"),
    "gif without frames": (lambda: b"GIF89a" + struct.pack("<HHBBB", 10, 10, 0, 0, 0) + b";", ""),
    "webp head": (lambda: b"RIFF\x24\0\0\0WEBPVP8 ", ""),
    "tiff to nowhere": (lambda: b"II*\0" + struct.pack("<I", 2**31), ""),
    "ppm bomb": (lambda: b"P6 60000 60000 255\n", "pixels"),
    "bmp lies": (
        lambda: saved(noise(), "BMP")[:18] + struct.pack("<ii", 50000, 50000) + b"\1\0\x18\0" + b"\0" * 60,
        "",
    ),
}


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    image_decoder = ImageDecoder(max_pixels=20_000_000)
    yield image_decoder
    image_decoder.close()


@pytest.mark.parametrize("name", GOOD)
def test_odd_files_give_a_picture(decoder: ImageDecoder, name: str) -> None:
    decoded = decoder.pixels(GOOD[name](), TOKENS, SIDE)
    assert decoded.dtype == np.uint8 and decoded.shape[2] == 3 and decoded.size
    assert decoded.shape[0] % SIDE == 0 and decoded.shape[0] * decoded.shape[1] <= TOKENS * SIDE**2
    if name == "rotated":
        assert decoded.shape[0] > decoded.shape[1]
    if name == "sixteen bits":
        assert set(np.unique(decoded)) == {60000 >> 8}
    if name == "png":
        assert np.array_equal(decoded, pixels(noise(), TOKENS, SIDE))


@pytest.mark.parametrize("name", BAD)
def test_hostile_files_are_refused_in_one_line(decoder: ImageDecoder, name: str) -> None:
    make, said = BAD[name]
    with pytest.raises(OutriderError) as refused:
        decoder.pixels(make(), TOKENS, SIDE)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert decoder.pixels(PNG, TOKENS, SIDE).size  # and the next one is read


def test_transparent_parts_are_white(decoder: ImageDecoder) -> None:
    assert (decoder.pixels(saved(Image.new("RGBA", (24, 24), (9, 9, 9, 0)), "PNG"), TOKENS, SIDE) == 255).all()


def test_a_process_that_hangs_or_dies_is_replaced() -> None:
    slow = ImageDecoder(seconds=0.0)
    errors = []
    for _ in range(2):
        with pytest.raises(OutriderError, match="too much memory or time") as refused:
            slow.pixels(PNG, TOKENS, SIDE)
        errors.append(refused.value)
    assert errors[0] is not errors[1], "an error that is raised again keeps the frames, and files, of all refusals"
    slow.close()
    decoder = DecodingProcess(10_000, PATIENCE)
    decoder.pixels(PNG, TOKENS, SIDE)
    assert decoder._process is not None
    decoder._process.kill()
    decoder._process.wait()
    assert decoder.pixels(PNG, TOKENS, SIDE).size
    decoder.pixels(PNG, TOKENS, SIDE)
    process = decoder._process
    decoder.close()
    assert process is not None and process.poll() is not None


@pytest.mark.linux
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no idle priority")
def test_an_image_that_takes_long_gets_idle_time_only() -> None:
    """By processor time, whatever else runs; the next image has a priority of its own again."""
    policies = []

    def decode(seconds: float) -> None:
        while os.sched_getscheduler(0) == os.SCHED_OTHER and time.thread_time() < seconds:
            pass
        policies.append(os.sched_getscheduler(0))

    for seconds in (30.0, QUICK_S / 4):
        worker = threading.Thread(target=decode, args=(seconds,))
        worker.start()
        stand_back(worker)
        assert not worker.is_alive()
    assert policies == [os.SCHED_IDLE, os.SCHED_OTHER]


@pytest.mark.linux
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_an_image_took_goes_back_to_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(child_process.__file__).read_text()
    script = tmp_path / "child_process.py"
    assert f"QUICK_S = {QUICK_S}\n" in source  # no idle time: on a busy machine it may never come
    script.write_text(source.replace(f"QUICK_S = {QUICK_S}\n", "QUICK_S = 99\n"))
    monkeypatch.setattr(child_process, "__file__", str(script))
    decoder = ImageDecoder(seconds=PATIENCE)
    sizes = list[int]()
    for side in (1500, 6000, 5000, 4000, 5000):
        decoder.pixels(saved(Image.new("LA", (side, side)), "PNG"), TOKENS, SIDE)
        process = decoder._large._process
        assert process is not None
        sizes.append(int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * resource.getpagesize() >> 20)
    decoder.close()
    assert max(sizes) < sizes[0] + 64, sizes


def test_small_images_do_not_wait_for_a_large_one() -> None:
    """Whoever decodes the large one holds its lock all the time."""
    decoder = ImageDecoder()
    large = saved(Image.new("1", (4000, 2000)), "PNG")
    with decoder._large._lock:
        thread = threading.Thread(target=decoder.pixels, args=(large, TOKENS, SIDE))
        thread.start()
        assert decoder.pixels(PNG, TOKENS, SIDE).size
        assert thread.is_alive(), "it needs the other process"
    thread.join()
    assert decoder.pixels(large, TOKENS, SIDE).size
    decoder.close()


def test_a_known_image_does_not_wait_for_the_tower() -> None:
    begun = threading.Event()
    done = threading.Event()
    seen = list[int]()

    def encode(image: torch.Tensor) -> torch.Tensor:
        seen.append(int(image[0, 0, 0]))
        if seen[-1] == 9:
            begun.set()
            assert done.wait(60)
        return image[0].float()

    shape = {"kind": "tower", "square": 0, "side": SIDE, "patch": SIDE, "positions": 1000}
    config = SimpleNamespace(**shape, bidirectional=False, pad_id=0, placeholder_id=0, boi_id=1, image_id=2, eoi_id=3)
    model: Any = SimpleNamespace(config=config, encode=encode)
    encoder = ImageEncoder(model, TOKENS, 4, 1 << 20)
    known, large = (np.full((24, 24, 3), value, np.uint8) for value in (7, 9))
    first = encoder.encode(known)
    threads = [threading.Thread(target=encoder.encode, args=(large,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(60) and encoder.encode(known) is first and seen == [7, 9]
    done.set()
    for thread in threads:
        thread.join()
    assert encoder.encode(large) is encoder.encode(large) and seen == [7, 9], "once an image"
    encoder.close()


def test_many_at_once_take_turns(decoder: ImageDecoder) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        decoded = list(pool.map(lambda data: decoder.pixels(data, TOKENS, SIDE), [PNG, JPEG] * 8))
    assert all(np.array_equal(decoded[0], other) for other in decoded[::2])


def mutated(seed: int) -> bytes:
    """A sound file of some format with a few bytes changed, cut out, doubled or put in."""
    rng = np.random.default_rng(seed)
    kind = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")[seed % 7]
    data = bytearray(saved(noise(), kind))
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(0, len(data)))
        size = int(rng.integers(1, 24))
        how = int(rng.integers(0, 5))
        piece = bytes(rng.integers(0, 256, size, dtype=np.uint8))
        if how == 0:
            data[at : at + size] = piece
        elif how == 1:
            data[at] ^= 1 << int(rng.integers(0, 8))
        elif how == 2:
            del data[max(8, at) :]
        elif how == 3:
            data[at:at] = data[at : at + size] * 3
        else:
            data[int(rng.integers(0, min(64, len(data))))] = int(rng.choice([0, 127, 128, 255]))  # in the header
    return bytes(data)


@pytest.mark.parametrize("first", range(0, 168, 42))
def test_mutated_files_give_a_picture_or_a_line(decoder: ImageDecoder, first: int) -> None:
    """No crash of ours, no descriptor or process left behind, and the next file is read."""
    good = saved(noise(), "PNG")
    want = decoder.pixels(good, 16, 12)
    with pytest.raises(OutriderError):
        decoder.pixels(b"no image", 16, 12)  # which starts the process for large files
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for seed in range(first, first + 42):
        try:
            decoded = decoder.pixels(mutated(seed), 16, 12)
            assert decoded.dtype == np.uint8 and decoded.ndim == 3 and decoded.shape[2] == 3, seed
        except OutriderError as error:
            assert str(error) and "\n" not in str(error) and len(str(error)) < 300, seed
    assert np.array_equal(decoder.pixels(good, 16, 12), want)
    assert not before or len(os.listdir("/proc/self/fd")) <= before


def test_a_busy_machine_refuses_no_photo() -> None:
    """A long decode gets idle time only: a file is refused for its processor time, long before the clock runs out."""
    assert DECODE_SECONDS >= 3 * CPU_SECONDS


def test_a_device_is_refused() -> None:
    """Its size is told as 0."""
    with pytest.raises(OutriderError, match="cannot read the image /dev/zero: it is a device"):
        read_file(Path("/dev/zero"), "image", MAX_BYTES)


def test_a_pipe_without_a_writer_is_empty(tmp_path: Path) -> None:
    """It was waited for without end."""
    os.mkfifo(tmp_path / "fifo")
    assert read_file(tmp_path / "fifo", "image", MAX_BYTES) == b""
