"""Public names of the data sets that jobs train on.

Here are a generated one, samples of MovieLens, and what `podembed prepare` writes.
"""

from podembed.jobs.movielens_files import MovieLensSpec, write_movielens
from podembed.jobs.prepare.prepared_set import PreparedSet, read_prepared
from podembed.jobs.synthetic import write_synthetic

__all__ = ["MovieLensSpec", "PreparedSet", "read_prepared", "write_movielens", "write_synthetic"]
