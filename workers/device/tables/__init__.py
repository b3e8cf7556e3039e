"""Tables that live on the devices: their rows, the lookup within a step, and the update of the rows that it named.

A host owns its buckets of such a table as of any other, and commits them. It sends them before the first step of a
generation, and takes them back for each commit. `device_tables` of `workers/job/tables.py` lists these tables. Read
`table_step.py` first.
"""
