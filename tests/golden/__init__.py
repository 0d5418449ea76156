"""What the program computed and wrote at one moment, kept so that a change of it is noticed.

- `runs/NAME.toml` and `runs/NAME.jsonl`: configs and the metrics that `gossamer simulate` gave for them.
- `dialogue.json`: the bytes that two gossipers sent each other.
- `docs/examples/vectors.json`, made by `vectors.py`: bytes of the protocol, and the fields in them.
- `gossamer-checkpoint-N`: a checkpoint of that format, and as JSON what is in it.

`python -m tests.golden.make`, from the repository's root, writes them anew. Do so only when a change was
meant to move them, and say in the commit why they moved: `git diff` then shows by how much.
"""
