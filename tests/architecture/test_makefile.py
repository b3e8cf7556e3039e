"""The Makefile can be read, and has each target once."""

from __future__ import annotations

import re
import subprocess
from collections import Counter

from tests.architecture.test_imports import ROOT


def test_each_target_is_there_once() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = Counter(re.findall(r"^([a-z][\w-]*):(?![^\n]*=)", text, re.MULTILINE))
    # Variables of a target stand in a line of their own.
    assert {name for name, count in targets.items() if count > 1} <= {"test"}
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert set(phony.split()) <= set(targets)
    subprocess.run(["make", "--dry-run", "help"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
