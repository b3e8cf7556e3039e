"""Tables that live on the devices of a job: which ones, and what such a table may be.

Nothing of JAX is imported here. Rows on devices are in `workers/device/tables`, and what a host does for them is in
`workers/host/device_tables`. Read `declared.py` first.
"""
