"""`JobError`: a job that cannot run as declared."""


class JobError(ValueError):
    """A job that cannot run as declared."""
