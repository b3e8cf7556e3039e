"""What runs on one host: input, table shard, exchange, device process and files. Plain classes; Ray in `workers.actors`
only.
"""
