"""What one host writes of a commit and reads back: buckets, changed rows, dense arrays, and the digests that prove
them.

Which commits count is decided in `orchestrator.commit`. The format is described in docs/checkpoint-format.md.

Read `files.py` first, then `shard.py` and `background_save.py`.
"""
