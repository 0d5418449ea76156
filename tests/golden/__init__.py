"""What the program computed and wrote at one moment, kept so that a change of it is noticed.

- `runs/NAME.toml` and `runs/NAME.jsonl`: configs and the metrics that `gossamer simulate` gave for them.
- `dialogue.json`: the bytes that two gossipers sent each other.
- `docs/examples/vectors.json`, made by `vectors.py`: bytes of the protocol, and the fields in them.
- `1.0`, …: what a release published, sent and saved, which later ones must read for ever; see `release.py`.
- `gossamer-checkpoint-2`: a checkpoint of a version before 1.0, which is refused in one line.

`python -m tests.golden.make`, from the repository's root, writes them anew. Do so only when a change was
meant to move them, and say in the commit why they moved: `git diff` then shows by how much.
"""
