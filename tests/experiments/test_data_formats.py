"""Every public file format, on small files written here in that format."""

import bz2
import gzip
import json
import lzma
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from gossamer.experiments.data import DataError, load, sources
from gossamer.experiments.data.cifar import read_batch, read_mosaic
from gossamer.experiments.data.handwriting import merged_labels, read_idx


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder whose files have no known checksum, so that small ones are accepted."""
    monkeypatch.setattr(sources, "CHECKSUMS", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for family in ("mnist", "femnist", "handwriting", "sensors", "cifar"):
        (tmp_path / family).mkdir()
    return tmp_path


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize("packed", [True, False])
def test_mnist_idx(root: Path, packed: bool, dot: str) -> None:
    images = np.zeros((3, 28, 28), dtype=np.uint8)
    images[2, 0, 1] = 255
    for part in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", np.array([7, 0, 3]))):
            name = f"{part}-{kind}-ubyte".replace("-idx", f"{dot}idx")
            content = idx(array)
            path = root / "mnist" / (name + ".gz" * packed)
            path.write_bytes(gzip.compress(content) if packed else content)
    data = load("mnist", root)
    assert data.train.x.shape == (3, 1, 28, 28)
    assert data.train.x[2, 0, 0, 1] == 1
    assert data.train.x.sum() == 1
    assert data.train.y.tolist() == [7, 0, 3]
    writers = root / "mnist" / "mnist_writers.npz"
    np.savez(writers, train_writer=np.int16([4, 4, 2000]), test_writer=np.int16([9, 9, 9]))
    grouped = load("mnist-writers", root)
    assert grouped.train.group is not None
    assert grouped.train.group.tolist() == [4, 4, 2000]
    assert "FEMNIST-D" in grouped.note
    np.savez(writers, train_writer=np.int16([4, 4]), test_writer=np.int16([9, 9, 9]))
    with pytest.raises(DataError, match="2 writers for 3 digits"):
        load("mnist-writers", root)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a", b"\x00\x00\x0d\x01" + bytes(8), "not an idx file of bytes: it begins with 00000d01"),
        ("a", b"", "not an idx file"),
        ("a", idx(np.zeros(9))[:-2], r"shape \(9,\), 9 bytes, but has 7"),
        ("a", idx(np.zeros(9))[:6], "ends after 6 bytes, inside its header"),
        ("a.gz", gzip.compress(idx(np.zeros(900)), mtime=0)[:-12], "cannot be unpacked"),
        ("a.gz", b"not gzip", "cannot be unpacked"),
    ],
)
def test_damaged_idx(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def leaf(writers: dict[str, list[int]]) -> str:
    """LEAF's json: paper is 1, and each image carries one pixel of ink at the place of its label."""
    data = {}
    for writer, ys in writers.items():
        images = np.ones((len(ys), 784))
        images[np.arange(len(ys)), ys] = 0
        data[writer] = {"x": images.tolist(), "y": ys}
    sizes = [len(ys) for ys in writers.values()]
    return json.dumps({"users": list(writers), "num_samples": sizes, "user_data": data})


def test_femnist_leaf_json_in_its_three_variants(root: Path) -> None:
    folder = root / "femnist" / "all_data"
    folder.mkdir()
    (folder / "all_data_0.json").write_text(leaf({"f01": [3, 61], "f02": [36]}))
    (folder / "all_data_1.json").write_text(leaf({"f03": [10, 38, 9], "f04": []}))
    a, m, d = (load(f"femnist-{variant}", root) for variant in "amd")
    assert (a.classes, m.classes, d.classes) == (62, 47, 10)
    assert a.train.x.shape == (6, 1, 28, 28)
    assert a.train.y.tolist() == [3, 61, 36, 10, 38, 9]
    assert a.train.flat().argmax(1).tolist() == a.train.y.tolist()  # ink is high
    assert a.train.x.sum() == 6
    assert m.train.y.tolist() == [3, 35, 36, 10, 12, 9]  # z joins Z, a stays, c joins C
    assert d.train.y.tolist() == [3, 9]
    assert a.train.group is not None
    assert d.train.group is not None
    assert a.train.group.tolist() == [0, 0, 1, 2, 2, 2]
    assert d.train.group.tolist() == [0, 2]
    assert a.note == "grouped by writer"
    assert a.test is None


def test_merged_labels_join_fifteen_letters() -> None:
    table = merged_labels()
    assert len(np.unique(table)) == 47
    assert table.max() == 46
    assert (table[:36] == np.arange(36)).all()
    apart = [chr(ord("a") + i) for i in range(26) if table[36 + i] >= 36]
    assert "".join(apart) == "abdefghnqrt"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not LEAF's JSON"),
        ('{"users": ["f1"]}', "KeyError: 'user_data'"),
        ('{"users": ["f1"], "user_data": {}}', "KeyError: 'f1'"),
        (leaf({"f1": [3]}).replace("[3]", "[3, 4]"), "writer f1: expected 2 images of 784"),
        (leaf({"f1": [70]}), r"writer f1: labels must lie in 0\.\.61, not 70\.\.70"),
        (leaf({"f1": []}), "no writer"),
    ],
)
def test_broken_leaf_json(root: Path, content: str, message: str) -> None:
    path = root / "femnist" / "all_data_0.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        load("femnist-a", root)
    assert str(path) in str(caught.value)


def test_femnist_pool_says_that_its_groups_are_styles(root: Path) -> None:
    x = np.full((3, 28, 28), 255, dtype=np.uint8)
    x[1, 0, 0] = 0
    np.savez(root / "femnist" / "femnist_pool.npz", x=x, y=np.uint8([5, 61, 9]))
    np.savez(root / "femnist" / "femnist_pseudo_writers.npz", group=np.uint8([0, 1, 1]))
    data = load("femnist-a", root)
    assert data.train.x[1, 0, 0, 0] == 1
    assert data.train.x.sum() == 1
    assert "not by writer" in data.note
    digits = load("femnist-d", root)
    assert digits.train.y.tolist() == [5, 9]


def test_pendigits(root: Path) -> None:
    path = root / "handwriting" / "pendigits_writers.npz"
    x = np.full((2, 28, 28), 51, dtype=np.uint8)
    np.savez(path, x=x, y=np.uint8([1, 9]), writer=np.uint8([44, 1]))
    data = load("pendigits", root)
    assert data.train.x.shape == (2, 1, 28, 28)
    assert float(data.train.x[0, 0, 0, 0]) == pytest.approx(0.2)
    assert data.train.group is not None
    assert data.train.group.tolist() == [44, 1]
    whole = path.read_bytes()
    np.savez(path, x=x, y=np.uint8([1, 9]))
    with pytest.raises(DataError, match=r"no array 'writer', only x, y"):
        load("pendigits", root)
    with path.open("wb") as file:
        np.save(file, x)
    single = path.read_bytes()
    for damaged in (whole[:-30], whole[:200] + bytes(8) + whole[208:], b"text", b"", single):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot be read as npz"):
            load("pendigits", root)


def libsvm(labels: list[int]) -> bytes:
    lines = [f"{label} 1:0.5 {place + 2}:-1.25" for place, label in enumerate(labels)]
    return ("\n".join(lines) + "\n").encode()


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [("", bytes), (".bz2", bz2.compress), (".gz", gzip.compress), (".xz", lzma.compress)],
)
def test_vsn_in_libsvm_format(root: Path, suffix: str, pack: type[bytes]) -> None:
    (root / "sensors" / f"combined{suffix}").write_bytes(pack(libsvm([1, 3, 2, 2])))
    (root / "sensors" / f"combined.t{suffix}").write_bytes(pack(libsvm([3, 1])))
    data = load("vsn", root)
    assert data.train.x.shape == (4, 100)
    assert data.train.x[:, 0].tolist() == [0.5] * 4
    assert data.train.x[2, 3] == -1.25
    assert data.train.y.tolist() == [0, 2, 1, 1]
    assert data.test is not None
    assert data.test.y.tolist() == [2, 0]
    assert data.train.group is None
    assert "no node ids" in data.note
    binary = load("vsn-binary", root)
    assert binary.test is not None
    assert binary.train.y.tolist() == [0, 1, 1]
    assert binary.test.y.tolist() == [0]
    assert binary.classes == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1 nonsense\n", "not LIBSVM text"),
        (b"1 101:2.0\n", "not LIBSVM text with 100 features"),
        (b"4 1:2.0\n", "labels must be 1, 2 or 3"),
        (b"1 1:nan\n", "not finite"),
    ],
)
def test_broken_libsvm(root: Path, content: bytes, message: str) -> None:
    (root / "sensors" / "combined").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load("vsn", root)


def test_damaged_compressed_libsvm(root: Path) -> None:
    content = bytearray(gzip.compress(libsvm([1, 2] * 50)))
    content[20:60] = b"\xff" * 40
    (root / "sensors" / "combined.gz").write_bytes(content)
    with pytest.raises(DataError, match="not LIBSVM text"):
        load("vsn", root)


def cells(arrays: list[np.ndarray]) -> np.ndarray:
    packed = np.empty((1, len(arrays)), dtype=object)
    for place, array in enumerate(arrays):
        packed[0, place] = array
    return packed


def test_vsn_from_mochas_mat_is_preferred_and_has_nodes(root: Path) -> None:
    (root / "sensors" / "combined").write_bytes(libsvm([1]))
    x = [np.full((2, 100), 0.25), np.full((3, 100), 0.5)]
    y = [np.array([[-1.0], [1.0]]), np.array([[1.0], [1.0], [-1.0]])]
    path = root / "sensors" / "vehicle.mat"
    savemat(path, {"X": cells(x), "Y": cells(y)})
    data = load("vsn", root)
    assert data.classes == 2
    assert data.train.x[:, 7].tolist() == [0.25, 0.25, 0.5, 0.5, 0.5]
    assert data.train.y.tolist() == [0, 1, 1, 1, 0]
    assert data.train.group is not None
    assert data.train.group.tolist() == [0, 0, 1, 1, 1]
    assert load("vsn-binary", root).train.y.tolist() == [0, 1, 1, 1, 0]
    savemat(path, {"X": cells(x), "Y": cells([y[0], y[1] + 1])})
    with pytest.raises(DataError, match="node 1: labels must be -1 or 1"):
        load("vsn", root)
    savemat(path, {"X": cells(x), "Y": cells([y[0], y[0]])})
    with pytest.raises(DataError, match=r"node 1: X is \(3, 100\) for 2 labels"):
        load("vsn", root)
    path.write_bytes(b"not a mat file")
    with pytest.raises(DataError, match=r"not MOCHA's \.mat"):
        load("vsn", root)


def test_vsn_sample_of_300(root: Path) -> None:
    acoustic, seismic = np.zeros((2, 50), np.float32), np.ones((2, 50), np.float32)
    path = root / "sensors" / "sensit300.npz"
    np.savez(path, acoustic=acoustic, seismic=seismic, y=np.uint8([1, 3]))
    data = load("vsn", root)
    assert data.train.x[0].tolist() == [0.0] * 50 + [1.0] * 50
    assert data.train.y.tolist() == [0, 2]
    assert "too few" in data.note


def test_hapt(root: Path) -> None:
    y, subject = np.uint8([1, 4, 5, 6]), np.uint8([30, 30, 2, 2])
    x = np.arange(400, dtype=np.float16).reshape(4, 100)
    np.savez(root / "sensors" / "hapt_fft100.npz", x=x, y=y, subject=subject)
    windows = np.full((4, 128, 6), 2000, dtype=np.int16)
    scale = np.float32([4000, 4000, 4000, 2000, 2000, 2000])
    np.savez(root / "sensors" / "hapt_raw128.npz", w=windows, scale=scale, y=y, subject=subject)
    data = load("hapt", root)
    assert data.train.x[1, 2] == 102
    assert data.train.y.tolist() == [0, 3, 4, 5]
    binary = load("hapt-sitstand", root)
    assert binary.train.y.tolist() == [0, 1]
    assert binary.train.group is not None
    assert binary.train.group.tolist() == [30, 2]
    assert binary.train.x[:, 0].tolist() == [-1, 1]  # standardised
    assert "in place of VSN" in binary.note
    raw = load("hapt-raw", root)
    assert raw.train.x.shape == (4, 128, 6)
    assert raw.train.x[0, 0].tolist() == [0.5, 0.5, 0.5, 1, 1, 1]


# --- CIFAR-10: published python batches, forged ones, and grids -----------------------------------------


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


def test_cifar10_that_is_missing_is_named_as_it_is_published(root: Path) -> None:
    with pytest.raises(DataError) as error:
        load("cifar10", root)
    assert "cifar-10-batches-py/data_batch_1 was not found; looked in" in str(error.value)
    assert "download its python version from https://" in str(error.value)
    assert "webp" not in str(error.value)


def test_cifar10_python_batches(root: Path) -> None:
    folder = root / "cifar" / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.zeros((2, 3072), dtype=np.uint8)
    pixels[1, 1024 + 32 + 5] = 255  # green, second row, sixth column
    published = python2_batch(pixels, [9, 4])
    for place in range(1, 6):
        (folder / f"data_batch_{place}").write_bytes(published)
    with pytest.raises(DataError, match=r"test_batch was not found.*other batches were found"):
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
    (folder / "data_batch_1").unlink()
    for name in ("cifar10_train_0.webp", "cifar10_train_1.webp", "cifar10_test.webp"):
        (root / "cifar" / name).touch()
    with pytest.raises(DataError, match=r"data_batch_1 was not found.*other batches were found"):
        load("cifar10", root)


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
        (pickle.dumps({b"data": np.zeros(3)}, protocol=4), "arrays of 'f8' are not allowed"),
    ],
)
def test_broken_batches(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_batch(tmp_path / "batch")


def test_cifar10_mosaics(root: Path) -> None:
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
        read_mosaic(root / "odd.webp")
    (root / "odd.webp").write_bytes(b"no image")
    with pytest.raises(DataError, match="cannot be read as an image"):
        read_mosaic(root / "odd.webp")
