"""From ids to activations and from gradients to updated rows, between one host's batch and the bytes that cross the
network.

No sockets here: a lookup fills and reads arrays, and `workers.host` sends them.

Read `steps.py` first: it has the way of a batch. In `rows_way.py` rows travel; in `pooled_way.py` owners pool what
they have of a bag. `placement.py` says which tables are cut, and `pooling_choice.py` which way those take.
"""
