"""`podembed prepare`: text to Parquet with final ids, in parallel and restartable; begin with
`jobs.prepare.preparation`.
"""
