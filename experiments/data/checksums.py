"""SHA-256 of the files whose content is known, by family and name.

A file is checked before it is read, so that a figure never rests on a damaged or different copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

KNOWN: Mapping[str, str] = MappingProxyType(
    {
        # MNIST as published, and the same four files unpacked
        "mnist/train-images-idx3-ubyte.gz": (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
        ),
        "mnist/train-labels-idx1-ubyte.gz": (
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
        ),
        "mnist/t10k-images-idx3-ubyte.gz": (
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
        ),
        "mnist/t10k-labels-idx1-ubyte.gz": (
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
        ),
        "mnist/train-images-idx3-ubyte": (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
        ),
        "mnist/train-labels-idx1-ubyte": (
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
        ),
        "mnist/t10k-images-idx3-ubyte": (
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
        ),
        "mnist/t10k-labels-idx1-ubyte": (
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
        ),
        # derived files
        "mnist/mnist_writers.npz": (
            "283137e3bc3fa89a8fbe0ebb5fe3608ebe859df1bdb9267746f943b658ce6829"
        ),
        "femnist/femnist_pool.npz": (
            "ef61526f24cfa6db78e4fb9eccfbbb6ce13c257fb6efcae64e8dc4143f2cbdd7"
        ),
        "femnist/femnist_pseudo_writers.npz": (
            "6dc441308192c80c6de52249ecb59afa5a4b34e92210eec1f270b4cacd0a1d57"
        ),
        "handwriting/pendigits_writers.npz": (
            "c6ae245f4481bed2ee75432ae9f74c88b73dd5d1d9689227c2ef2a0b4bde5c31"
        ),
        "sensors/sensit300.npz": (
            "0991c5b1585d8acd04f5089e047d1def62b048e9b4e8401c7c17ab3639694715"
        ),
        "sensors/hapt_fft100.npz": (
            "313ffdad50be2f0096d28b3b92af1f8ce19fceb5af48a9f19aadb132bccfbc3e"
        ),
        "sensors/hapt_raw128.npz": (
            "a9a0d98ac24effbd23977578142346890d8e85a9936a10faeaa464f8961f22a4"
        ),
        "cifar/cifar10_train_0.webp": (
            "7d659541ed95237ea4e04e2d33389e1104c1953861748ff53d660d6c8d6654f9"
        ),
        "cifar/cifar10_train_1.webp": (
            "51af9519a93c50876c6e10004965e1e5959387da1f8d7b96f16f7ca26219af79"
        ),
        "cifar/cifar10_test.webp": (
            "df199aec7516a004a23ad02816a63a368d2208347ff1c4011eaa91a2503201fc"
        ),
        "cifar/cifar10_labels.npz": (
            "b09a6619f967265807f2a05864fb46e152895782c29ca0637dff1335d9f80820"
        ),
    }
)
