"""What a host does for tables that live on its devices: it sends ids with each batch, and rows between commits.

The host owns its buckets of such a table, saves them and restores them like those of others. Between two commits its
own rows are those of the last one, so who reads samples asks the devices. Rows on devices are in
`workers/device/tables`. Read `device_ids.py` first.
"""
