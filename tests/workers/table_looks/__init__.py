"""Looks at samples of tables' rows, beside plain numpy over whole tables.

Hosts are tables in this process, cut by their buckets, so nothing of Ray is needed.
"""
