"""`podembed supervise`: a command that is run again until it is done, here or as Ray jobs. It knows exit codes and no
training.

Read `supervision.py` first.
"""
