"""`ConfigurationError`. In a module of its own, since declarations raise it that others are made of."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """Settings that cannot work; retrying does not help."""
