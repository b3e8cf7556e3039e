"""Faults that a plan injects at named points of the program, for tests and `podembed chaos`. Without a plan a point
costs one comparison.

How real faults are found and survived is the business of `workers.liveness` and of the orchestrator.

Read `plan.py` first, then `inject.py`.
"""
