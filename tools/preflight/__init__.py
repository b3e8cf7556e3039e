"""What the TPU's compiler makes of a job's programs, on a machine without a TPU: `podembed compile`.

A process of its own compiles for a slice that is not there and reads what comes back. Read `compiling` first.
"""
