"""`podembed check-device`: whether a machine's TPUs or GPUs compute what its CPU computes, and how fast they are.

Processes of their own do the same on the devices and on the CPU. Read `checks.py` first.
"""
