"""TPU slices on a Ray cluster: which machine is which part of one, how whole slices are reserved and held, and the
environment of their device processes.

Which slices a run uses is decided in `orchestrator.decisions.slices`.

Read `backend.py` first.
"""
