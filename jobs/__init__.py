"""What people run and copy: the command line, jobs, models and data, and how a run is shown and supervised."""
