"""What a commit of a run says about data: evaluations, predictions, ranks and recommendations.

Read `committed_model.py` first, then `evaluate.py`.
"""
