"""The one way in which a gang of JAX processes can be wrong although it formed. In a module of its own, since the
driver tells it apart without JAX.
"""

from __future__ import annotations


class GangError(RuntimeError):
    """The JAX processes of a run do not share their devices as equals."""
