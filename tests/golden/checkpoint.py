"""One checkpoint of a peer in the middle of its training, and what is in it."""

from __future__ import annotations

import asyncio
import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gossamer.peer import Settings, load_checkpoint, save_checkpoint

FOLDER = Path(__file__).parent
REFUSED = FOLDER / "gossamer-checkpoint-2"
"""Of a version before 1.0."""
LISTED = 100
"""Values of an array that are written down one by one."""
NO_BOOT = "00000000-0000-0000-0000-000000000000"
BOOT = Path("/proc/sys/kernel/random/boot_id")


def plain(value: Any) -> Any:
    """A tree as JSON can hold it: arrays and tensors as type, shape and values, or a digest of many."""
    if isinstance(value, torch.Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        values = np.asarray(value)
        told = values.tolist() if values.size <= LISTED else sha256(values.tobytes()).hexdigest()
        return {kind: str(value.dtype), "shape": list(value.shape), "values": told}
    if isinstance(value, dict):
        return [[plain(key), plain(each)] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


def content(path: Path) -> Any:
    """What is in a checkpoint, as it was written down beside it."""
    return json.loads(path.with_name(path.name + ".json").read_text("utf-8"))


def write(folder: Path, kept: Path) -> None:
    """Let two peers learn, and keep the checkpoint that one of them has after its second round."""
    asyncio.run(_live(folder, kept))
    tree = load_checkpoint(kept)
    assert tree is not None
    tree = _without_machine(tree)
    save_checkpoint(kept, tree)
    text = json.dumps(plain(tree), indent=1) + "\n"
    kept.with_name(kept.name + ".json").write_text(text, "utf-8")


async def _live(folder: Path, kept: Path) -> None:
    # Here, so that reading a file of a former version needs none of this.
    from gossamer.gossip import MemoryBroker, MemoryTransport
    from gossamer.peer import Peer

    broker = MemoryBroker()

    def keep(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            shutil.copy(folder / "ann.checkpoint", kept)

    peers = [
        Peer(
            name, learner(seed), settings(),
            lambda client, will, hook: MemoryTransport(broker, client, will=will, on_connect=hook),
            checkpoint=folder / f"{name}.checkpoint", seed=seed,
            on_record=keep if name == "ann" else lambda _: None,
        )
        for seed, name in enumerate(("ann", "bob"))
    ]  # fmt: skip
    await asyncio.gather(*(peer.run() for peer in peers))


def settings() -> Settings:
    """The settings of both peers."""
    return Settings(swarm="golden", rounds=3, expect=("ann", "bob"))


def learner(seed: int) -> Any:
    """The learner of ann (0) or bob (1)."""
    from gossamer.models import SgdLearner, SlicedNetwork, mlp

    network = SlicedNetwork(
        mlp("4=5=2", activation="sigmoid", output="sigmoid"),
        {"global": "4-4-2"},
        peer=str(seed),
        seed=0,
    )
    random = torch.Generator().manual_seed(seed)
    x, y = torch.randn(20, 4, generator=random), torch.randint(0, 2, (20,), generator=random)
    return SgdLearner(
        network,
        (x, y),
        (x, y),
        local_samples=10,
        batch=5,
        rate=0.2,
        loss="squared",
        reduction="sum",
        seed=seed,
    )


def _without_machine(value: Any) -> Any:
    """The same tree without the name of this machine's boot."""
    if isinstance(value, dict):
        return {key: _without_machine(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_machine(each) for each in value]
    if isinstance(value, str) and BOOT.exists() and value == BOOT.read_text("ascii").strip():
        return NO_BOOT
    return value
