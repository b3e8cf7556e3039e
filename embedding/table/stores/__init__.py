"""Where the rows of tables lie, and the copies that saving and undo take of them.

Addresses of rows are known here and in `kernels` alone. Read `store.py` first: what is asked of a store of any kind,
and of many at once. The usual kind is `ram.py`, rows in memory. `ram_group.py` works on many tables of it at once,
`ram_kept.py` keeps rows before they change.
"""
