"""CIFAR-10: published python batches, forged ones, and grids, all written here."""

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gossamer.experiments.data import DataError, load, sources
from gossamer.experiments.data.cifar import read_batch, read_grid


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder whose files have no known checksum, so that small ones are accepted."""
    monkeypatch.setattr(sources, "KNOWN", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cifar").mkdir()
    return tmp_path


def python2_batch(pixels: np.ndarray, labels: list[int]) -> bytes:
    """The opcodes of the published files, which Python 2 wrote: byte strings, protocol 2."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def name(module: str, attribute: str) -> bytes:
        return f"c{module}\n{attribute}\n".encode()

    raw = pixels.tobytes()
    dtype = name("numpy", "dtype") + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) * 2 + number(0) + b"tb"
    array = name("numpy.core.multiarray", "_reconstruct") + name("numpy", "ndarray")
    array += number(0) + b"\x85" + text(b"b") + b"\x87R"
    shape = number(len(pixels)) + number(3072) + b"\x86"
    array += b"(" + number(1) + shape + dtype + b"\x89"
    array += b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    numbers = b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def test_cifar10_python_batches(root: Path) -> None:
    folder = root / "cifar" / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.zeros((2, 3072), dtype=np.uint8)
    pixels[1, 1024 + 32 + 5] = 255  # green, second row, sixth column
    published = python2_batch(pixels, [9, 4])
    for place in range(1, 6):
        (folder / f"data_batch_{place}").write_bytes(published)
    with pytest.raises(DataError, match=r"test_batch was not found.*other batches are there"):
        load("cifar10", root)
    modern = {b"data": pixels, b"labels": [9, 4]}
    (folder / "test_batch").write_bytes(pickle.dumps(modern, protocol=4))
    data = load("cifar10", root)
    assert data.test is not None
    assert data.train.x.shape == (10, 3, 32, 32)
    assert data.train.x[1, 1, 1, 5] == 1
    assert data.train.x.sum() == 5
    assert data.train.y.tolist() == [9, 4] * 5
    assert (data.test.x == data.train.x[:2]).all()


class Harmful:
    """What a forged batch could carry: reading it with pickle makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_forged_batch_is_refused_and_does_nothing(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": Harmful(tmp_path / "made"), b"labels": []}))
    with pytest.raises(DataError, match=r"data_batch_1: asks for \w+\.mkdir.*refused"):
        read_batch(path)
    assert not (tmp_path / "made").exists()
    pickle.loads(path.read_bytes())  # the forgery does work where nothing stops it
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a CIFAR-10 python batch"),
        (pickle.dumps([1, 2]), "not a CIFAR-10 python batch"),
        (python2_batch(np.zeros((2, 3072), np.uint8), [1]), r"2 images but labels of shape \(1,\)"),
        (pickle.dumps({b"data": np.zeros(3)}, protocol=4), "arrays of 'f8' are not admitted"),
    ],
)
def test_broken_batches(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_batch(tmp_path / "batch")


def test_cifar10_grids(root: Path) -> None:
    rng = np.random.default_rng(0)
    originals = []
    for name in ("train_0", "train_1", "test"):
        images = rng.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
        grid = images.reshape(2, 3, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(64, 96, 3)
        Image.fromarray(grid).save(root / "cifar" / f"cifar10_{name}.webp", lossless=True)
        originals.append(images)
    train, test = rng.integers(0, 10, 12), rng.integers(0, 10, 6)
    np.savez(root / "cifar" / "cifar10_labels.npz", train=train, test=test)
    data = load("cifar10", root)
    assert data.test is not None
    assert np.allclose(data.test.x.numpy() * 255, originals[2].transpose(0, 3, 1, 2))
    assert np.allclose(data.train.x[6:].numpy() * 255, originals[1].transpose(0, 3, 1, 2))
    assert data.train.y.tolist() == train.tolist()
    Image.new("RGB", (33, 32)).save(root / "odd.webp")
    with pytest.raises(DataError, match="33×32, not a grid"):
        read_grid(root / "odd.webp")
    (root / "odd.webp").write_bytes(b"no image")
    with pytest.raises(DataError, match="cannot be read as an image"):
        read_grid(root / "odd.webp")
