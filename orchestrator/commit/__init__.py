"""Who may commit, what a commit is, and which commits stay: leases, manifests, verification, deletion.

What hosts write is the business of `workers.checkpoint`.

Read `lease_protocol.py` first, then `lease.py` and `manifest/`.
"""
