"""Compiled loops over rows and ids, each one pass over its arrays.

A kernel takes plain arrays and knows neither tables nor hosts; who owns the arrays is the business of `table` and
`lookup`. The plain numpy form of every kernel lies in `tests/embedding/reference.py`.

Read `ids.py` first, then `pool.py` and `updates.py`: together they are one step.
"""
