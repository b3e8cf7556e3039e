"""TPU slices on a Ray cluster: which machine is which part of one, and how whole slices are reserved and held. What
their device processes find in the environment is here, too.

Which slices a run uses is decided in `orchestrator.decisions.slices`.

Read `backend.py` first.
"""
