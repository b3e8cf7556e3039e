"""Which rows a host reads at which step, and a thread that reads them ahead.

The order of samples depends on the run alone, never on the number of hosts. How files are decoded is said in
`workers.formats`.

Read `lanes.py` first, then `reader.py`.
"""
