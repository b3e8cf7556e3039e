"""What people run and copy: the command line, jobs, models and generated data."""
