"""The Python code of README and docs: what runs as printed, and what a page calls a fragment.

A block that opens with three backticks and `python` runs after those above it on its page, in a folder where the files
are that the page speaks of. One that opens with `python fragment` needs what the reader has: a job, a run, a cluster.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """Code of a page; `line` is its first one there, `kind` what follows `python`."""

    page: Path
    line: int
    kind: str
    code: str

    def run(self, names: dict[str, Any]) -> None:
        """Adds what the code defines to `names`. A traceback names the line of the page."""
        exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), names)


def blocks(page: str, *, fragments: bool = False) -> list[Block]:
    """Those of a page such as `docs/track.md` that run as printed, with `fragments` all, in their order."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    every = [Block(path, text.count("\n", 0, at.start(2)) + 1, at[1].strip(), at[2]) for at in BLOCK.finditer(text)]
    return [block for block in every if fragments or not block.kind]
