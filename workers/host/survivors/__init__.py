"""What a host that lived on after a fault still has of a commit, and how it gets the rest.

`moves` brings buckets from host to host. `verification` compares those that stayed with the commit while training goes
on. Read `surviving_shard.py` first, which knows what is here.
"""
