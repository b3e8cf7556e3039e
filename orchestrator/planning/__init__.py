"""What a run makes of predictions: what its tables took, which plan it follows, and when it changes that plan.

Predictions themselves are in `orchestrator.prediction`, and where tables lie in `decisions.table_plan`.

Read `measured.py` first.
"""
