"""Tables on devices, in real runs beside the same runs with tables on hosts.

`jobs.py` has the job and what is compared. Nothing of Ray is needed but in tests of several hosts.
"""
