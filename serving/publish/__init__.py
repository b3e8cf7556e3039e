"""A commit as a version that servers answer with: records, gates, the log of pointers."""
