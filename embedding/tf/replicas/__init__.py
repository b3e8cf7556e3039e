"""Values of several replicas, as `tf.distribute` has them: made from datasets and batches, reduced, and handed to one
function each.

Processes and sockets of a strategy on hosts are the business of `workers.stepwise` and `orchestrator.stepwise`.

Read `per_replica.py` first, then `strategies.py`.
"""
