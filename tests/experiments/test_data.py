"""Samples, the registry, and where files are looked for."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from gossamer.experiments.data import (
    DataError,
    Dataset,
    Samples,
    from_torch,
    keep_classes,
    load,
    names,
    partition,
    sources,
    standardise,
)

needs_files = pytest.mark.skipif(
    "GOSSAMER_DATA" not in os.environ, reason="GOSSAMER_DATA does not point at the real files"
)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with no data: nothing in GOSSAMER_DATA, nothing in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GOSSAMER_DATA", raising=False)
    return tmp_path


def small() -> Samples:
    return Samples(
        torch.arange(24, dtype=torch.float32).reshape(4, 1, 2, 3),
        torch.tensor([0, 1, 2, 1]),
        torch.tensor([5, 5, 9, 9]),
    )


def test_take_keeps_rows_labels_and_groups_together() -> None:
    part = small().take(np.array([2, 0]))
    assert part.x[0, 0, 0, 0] == 12
    assert part.y.tolist() == [2, 0]
    assert part.group is not None
    assert part.group.tolist() == [9, 5]
    assert small().take(torch.tensor([False, True, False, True])).y.tolist() == [1, 1]
    assert len(small().take([])) == 0
    assert small().flat().shape == (4, 6)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 4], "0 to 4 were asked of 4"),
        ([-1], "-1 to -1"),
        ([0.5], "whole numbers"),
        (np.array([True, False]), "mask of 2"),
    ],
)
def test_take_refuses_indices_that_mean_nothing(indices: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        small().take(indices)


def test_samples_and_datasets_check_what_they_hold() -> None:
    x, y = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(DataError, match=r"float32.*torch\.float64"):
        Samples(x.double(), y)
    with pytest.raises(DataError, match=r"Samples\.y must be int64 of shape \(3,\)"):
        Samples(x, y[:2])
    with pytest.raises(DataError, match=r"Samples\.group"):
        Samples(x, y, y.float())
    with pytest.raises(DataError, match="odd: train labels run from 0 to 2, but 2 classes"):
        Dataset("odd", small(), None, classes=2)


def test_keep_classes_renumbers_in_the_order_given() -> None:
    part = keep_classes(small(), (2, 1))
    assert part.y.tolist() == [1, 0, 1]
    assert part.x[:, 0, 0, 0].tolist() == [6, 12, 18]
    assert part.group is not None
    assert part.group.tolist() == [5, 9, 9]


def test_standardise_uses_the_statistics_of_by() -> None:
    train = Samples(torch.tensor([[0.0, 7.0], [2.0, 7.0]]), torch.tensor([0, 1]))
    test = Samples(torch.tensor([[4.0, 7.0]]), torch.tensor([0]))
    assert standardise(train).x.tolist() == [[-1, 0], [1, 0]]
    assert standardise(test, by=train).x.tolist() == [[3, 0]]


def test_from_torch_reads_tensors_and_a_choice_of_indices() -> None:
    source = TensorDataset(torch.rand(5, 3), torch.arange(5))
    part = from_torch(source, [4, 1])
    assert torch.equal(part.x, source.tensors[0][[4, 1]])
    assert part.y.tolist() == [4, 1]
    assert len(from_torch(source)) == 5


def test_from_torch_scales_bytes_and_turns_images() -> None:
    pixels = np.zeros((2, 4, 3), dtype=np.uint8)
    pixels[0, 1, 2] = 255
    colour = from_torch([(Image.fromarray(pixels), 1)])
    assert colour.x.shape == (1, 3, 2, 4)
    assert colour.x[0, 2, 0, 1] == 1
    assert colour.x.sum() == 1
    grey = from_torch([(Image.fromarray(pixels[:, :, 2]), np.int64(3))])
    assert grey.x.shape == (1, 1, 2, 4)
    assert grey.y.tolist() == [3]
    assert from_torch([(torch.tensor([255, 0], dtype=torch.uint8), 0)]).x.tolist() == [[1, 0]]
    assert from_torch([(2.5, 0)]).x.tolist() == [[2.5]]


def test_from_torch_says_what_does_not_fit() -> None:
    with pytest.raises(DataError, match="no samples"):
        from_torch([])
    with pytest.raises(DataError, match=r"sample 1 has shape \(3,\), the first one \(2,\)"):
        from_torch([(torch.zeros(2), 0), (torch.zeros(3), 0)])
    with pytest.raises(DataError, match="sample 1 has a value that is not finite"):
        from_torch([(torch.zeros(2), 0), (torch.tensor([0.0, torch.nan]), 0)])


def test_digits_are_built_in(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_DATA", str(empty / "mistyped"))
    data = load("digits")
    assert data.test is not None
    assert data.train.x.shape == (1437, 1, 8, 8)
    assert data.test.x.shape == (360, 1, 8, 8)
    assert (float(data.train.x.min()), float(data.train.x.max())) == (0, 1)
    assert data.train.y.unique().tolist() == data.test.y.unique().tolist() == list(range(10))
    assert data.train.y[:10].tolist() == list(range(10))  # the file's own order
    assert torch.equal(load("digits").train.x, data.train.x)
    parts = partition.successive(len(data.train), 8)
    assert sum(len(data.train.take(part)) for part in parts) == 1437


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(DataError, match=r"'minst': did you mean 'mnist'\? There are digits, "):
        load("minst")


@pytest.mark.parametrize("name", [name for name in names() if name not in ("digits", "mnist")])
def test_a_missing_file_is_named_with_places_checksum_and_advice(empty: Path, name: str) -> None:
    (empty / "data").mkdir()
    with pytest.raises(DataError) as caught:
        load(name, empty / "data")
    text = str(caught.value)
    assert text.startswith(f"{name}: ")
    assert str(empty / "data") in text
    assert str(empty / "cache" / "gossamer") in text
    # CIFAR-10 is named as it is published, in files that have no checksum here.
    assert name == "cifar10" or any(checksum in text for checksum in sources.CHECKSUMS.values())
    assert "GOSSAMER_DATA" in text or "put " in text
    assert "\n" not in text


def test_a_data_folder_that_does_not_exist_is_an_error(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"the data root is .*nowhere, which is not a folder"):
        load("hapt", empty / "nowhere")
    monkeypatch.setenv("GOSSAMER_DATA", str(empty / "nowhere"))
    with pytest.raises(DataError, match=r"GOSSAMER_DATA is .*nowhere, which is not a folder"):
        load("mnist")


def test_a_damaged_file_is_named_with_both_checksums(empty: Path) -> None:
    folder = empty / "sensors"
    folder.mkdir()
    (folder / "hapt_fft100.npz").write_bytes(b"broken")
    found = hashlib.sha256(b"broken").hexdigest()
    with pytest.raises(DataError) as caught:
        load("hapt", empty)
    text = str(caught.value)
    assert str(folder / "hapt_fft100.npz") in text
    assert sources.CHECKSUMS["sensors/hapt_fft100.npz"] in text
    assert found in text


@pytest.mark.mnist
@needs_files
def test_real_mnist() -> None:
    data = load("mnist")
    assert data.test is not None
    assert data.train.x.shape == (60000, 1, 28, 28)
    assert data.train.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.test.y[:5].tolist() == [7, 2, 1, 0, 4]
    assert float(data.train.x.mean()) == pytest.approx(0.1307, abs=1e-4)  # the published mean


@pytest.mark.mnist
@needs_files
def test_real_writers_give_64_peers_of_100_digits() -> None:
    data = load("mnist-writers")
    parts = partition.by_group(data.train.group, 64, 100)
    assert len(parts) == 64
    assert all(len(data.train.take(part).y.unique()) == 10 for part in parts)
