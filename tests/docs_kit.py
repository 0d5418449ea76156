"""The pages of README and docs, and the blocks of code in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"(<!-- run: \w+ -->\n)?^```(\S*).*?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w.-]+\.(?:py|toml))\b")


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    text: str
    runs: bool

    @property
    def file(self) -> str | None:
        """The name of the file that the block is the content of."""
        match = FILE.match(self.text)
        return match[1] if match else None


def blocks(page: Path) -> list[Block]:
    found = BLOCK.findall(page.read_text("utf-8"))
    return [Block(page, language, text, bool(run)) for run, language, text in found]


ALL = [block for page in PAGES if "_build" not in page.parts for block in blocks(page)]


def name(value: Any) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else ""


def with_language(language: str) -> list[Path]:
    return list(dict.fromkeys(block.page for block in ALL if block.language == language))


def write_files(page: Path, folder: Path) -> None:
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text, "utf-8")


def lines(block: Block) -> list[list[str]]:
    """The commands of a block, as lists of words."""
    words = (shlex.split(line, comments=True) for line in block.text.splitlines())
    return [each for each in words if each]
