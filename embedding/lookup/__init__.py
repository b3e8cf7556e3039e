"""From ids to activations and from gradients to updated rows, between one host's batch and the bytes that cross the
network.

No sockets here: a lookup fills and reads arrays, and `workers.host` sends them.

Read `sharded.py` first (tables that are cut), then `owner_pooled.py` (tables that lie whole on one host) and
`placement.py` (which is which).
"""
