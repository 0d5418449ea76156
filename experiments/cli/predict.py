"""`gossamer predict`: classes of new inputs by the network that a peer wrote, also while it trains on."""

from __future__ import annotations

import json
import sys
import time
import zipfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from . import console
from .console import command, load_torch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ...models import Learner


@command("predict", slow=True)
def predict_command(
    network: Path,
    inputs: list[Path],
    *,
    entry: str | None = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print class and score of every input, by the network of a peer; the peer may be running.

    The score is the class's probability if the network was trained with cross-entropy, else its output.
    The network's file names the function that made its learner; it is called to build the network, and
    must be importable here or in the current folder.

    Args:
        network: The peer's network, NAME.safetensors, written by `gossamer join` or `gossamer swarm`.
        inputs: Files with one input per row: .npy, .npz (its array x) or .csv (numbers, with or without a
            line of titles).
        entry: module:function that makes the learner, instead of the one that the file names; called with
            the arguments that the file names.
        as_json: Print one JSON object per input, with all outputs.
    """
    files = [(path, read_inputs(path)) for path in inputs]
    load_torch()
    from gossamer.entry import call_entry

    from ...models import Learner, predicted_classes, predicted_scores
    from ...peer import read_about

    about = read_about(network)
    if (name := entry or about["entry"]) is None:
        raise ConfigError(
            f"{network}: does not say which function made it; give --entry module:function"
        )
    learner = call_entry(name, about["arguments"])
    if not isinstance(learner, Learner):
        raise ConfigError(f"{name} returned a {type(learner).__name__}, not a learner")
    learner.network.load(network)
    learner.network.module.eval()
    outputs_by_file = [(path, _outputs(learner, array, path)) for path, array in files]
    console.warn(f"{network}: {_age(about, time.time())}")
    for path, outputs in outputs_by_file:
        classes, scores = predicted_classes(learner, outputs), predicted_scores(learner, outputs)
        for row, (label, score) in enumerate(zip(classes.tolist(), scores.tolist(), strict=True)):
            if as_json:
                line = {"file": str(path), "row": row, "class": label, "score": score}
                line |= {"outputs": outputs[row].tolist()}
                line |= {"round": about["round"], "written": about["time"]}
                sys.stdout.write(json.dumps(line) + "\n")
            else:
                sys.stdout.write(f"{path}:{row}: class {label}, score {score:.3f}\n")


def _age(about: dict[str, Any], now: float) -> str:
    """Return text: the round of a network, and how long ago it was written."""
    try:
        seconds = now - datetime.fromisoformat(about["time"]).timestamp()
    except ValueError:
        return f"network of round {about['round']}"
    ages = {"days": 86400, "hours": 3600, "min": 60, "s": 1}
    unit = next((unit for unit, size in ages.items() if seconds >= 2 * size), "s")
    return f"network of round {about['round']}, written {seconds / ages[unit]:.0f} {unit} ago"


def _outputs(learner: Learner, array: np.ndarray[Any, Any], path: Path) -> Tensor:
    """Return the network's outputs, one row per input; ConfigError names a file that does not fit."""
    import numpy as np
    import torch

    # Of the two types that torch knows for sure; a file may have any size and byte order of numbers.
    if _takes_integers(learner):
        with np.errstate(invalid="ignore"):
            integers = array.astype(np.int64)
        if (integers != array).any():
            raise ConfigError(
                f"{path}: the network was trained with integers; these are not all integers"
            )
        values = torch.from_numpy(integers)
    else:
        values = torch.from_numpy(array.astype(np.float64)).to(learner.network.flat.dtype)
    shape = _input_shape(learner)
    if shape is not None and values[0].numel() == shape.numel():
        values = values.reshape(len(values), *shape)  # rows of a table, for a network of images
    try:
        with torch.no_grad():
            outputs = learner.network(values)
    except (RuntimeError, IndexError) as error:  # the second: a token that an embedding lacks
        size = " x ".join(map(str, values.shape[1:]))
        if shape is None or values.shape[1:] == shape:
            reason = " ".join(str(error).split())
        else:
            reason = f"it was trained with {' x '.join(map(str, shape))}"
        raise ConfigError(
            f"{path}: inputs of {size} numbers do not fit the network: {reason}"
        ) from None
    if outputs.ndim != 2:
        raise ConfigError(
            f"{path}: the network's outputs have the shape {tuple(outputs.shape)}, not one row per input"
        )
    return outputs


def _takes_integers(learner: Learner) -> bool:
    """Return whether the network's inputs are integers, such as the tokens of an embedding."""
    inputs = getattr(learner, "samples", (None,))[0]
    return inputs is not None and not inputs.is_floating_point()


def _input_shape(learner: Learner) -> Any:
    """Return the shape of one input, from the learner's own samples; None if it has none."""
    for name in ("samples", "held_out"):
        pair = getattr(learner, name, None)
        if isinstance(pair, tuple) and len(pair[0]):
            return pair[0].shape[1:]
    return None


def read_inputs(path: Path) -> np.ndarray[Any, Any]:
    """Return the inputs in a file, one per row; ConfigError says what is wrong with it."""
    import numpy as np

    try:
        match path.suffix.lower():
            case ".npy":
                array = np.load(path, allow_pickle=False)
            case ".npz":
                with np.load(path, allow_pickle=False) as arrays:
                    array = arrays["x"]
            case ".csv":
                array = _read_csv(path)
            case _:
                raise ConfigError(f"{path}: inputs are read from .npy, .npz and .csv files")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except KeyError:
        raise ConfigError(f"{path}: has no array named x") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if array.ndim < 2 or not len(array) or array.dtype.kind not in "fiub":
        raise ConfigError(
            f"{path}: needs one row of numbers per input, not {array.dtype} of shape {array.shape}"
        )
    return array


def _read_csv(path: Path) -> np.ndarray[Any, Any]:
    """Return the numbers of a table separated by commas; its first line may have titles."""
    import numpy as np

    lines = path.read_text("utf-8").splitlines()
    try:
        return np.loadtxt(lines, delimiter=",", ndmin=2)
    except ValueError:
        return np.loadtxt(lines[1:], delimiter=",", ndmin=2)
