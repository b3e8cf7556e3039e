"""The driver's side of the step-by-step mode: a `PodStrategy` and the hosts behind it, one call of a step at a time.

The driver of runs imports nothing of it. Read `strategy.py` first, then `pod.py`.
"""
