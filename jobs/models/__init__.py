"""Dense halves of the jobs."""
