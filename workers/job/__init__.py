"""`JobConfig`, what a user declares about one training job, and how its evaluations are judged.

How, where and how long a job runs is declared in `orchestrator.api`.

Read `job.py` first.
"""
