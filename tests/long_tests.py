"""Tests that take minutes: they run with `make faults` and `make elastic`, and are skipped elsewhere."""

from __future__ import annotations

import os

import pytest

is_long = pytest.mark.skipif("PODEMBED_LONG_TESTS" not in os.environ, reason="takes minutes; make faults, make elastic")
