"""From ids to activations and from gradients to updated rows, between one host's batch and the bytes that cross the
network.

No sockets here: a lookup fills and reads arrays, and `workers.host` sends them.

Read `steps.py` first: it has the way of a batch. `sharded.py` is for tables that are cut, `owner_pooled.py` for tables
that lie whole on one host, and `placement.py` says which is which.
"""
