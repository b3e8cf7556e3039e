"""`InputError`: what is wrong with the data, as opposed to with the declaration of it (`DataConfigError`).

It stands alone so that indexing, decoding and reading can raise it without importing each other.
"""

from __future__ import annotations


class InputError(ValueError):
    """A file, a column or a value of the data is not what was declared. The message names it as closely as it is
    known.
    """
