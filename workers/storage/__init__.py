"""Files of a run on a local disk or an object store, addressed by relative names, and the JSON that is kept in them.

What the files mean is said in `workers.checkpoint` and in the orchestrator.

Read `store.py` first, then `strict_json.py`; `storage_errors.py` has the ways in which storage fails.
"""
