"""Errors of a cluster."""


class ClusterError(RuntimeError):
    """An error to show to the user without a traceback."""


class NotAvailable(ClusterError):
    """Why this machine cannot run such a cluster."""
