"""Metrics of an evaluation that a job may declare beside `LogLoss` and `RecallAt`, which training knows.

They judge scores alone, and know neither runs nor files. Read `of_samples.py` first.
"""
