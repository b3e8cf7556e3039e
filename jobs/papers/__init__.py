"""Jobs that train models of papers on ratings in MovieLens' form.

Each file is one paper: its model, and the job that trains it. docs/models.md has the commands and the figures. Read
`ncf.py` first; `ratings.py` makes the samples.
"""
