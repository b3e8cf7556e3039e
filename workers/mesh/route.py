"""`Route`: how the frames of an exchange travel."""

from __future__ import annotations

from enum import StrEnum


class Route(StrEnum):
    """See the module. The text is what users write and see."""

    AUTO = "auto"
    DIRECT = "direct"
    TWO_HOP = "two-hop"
