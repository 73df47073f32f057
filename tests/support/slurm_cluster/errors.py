"""What can be wrong with a cluster."""


class ClusterError(RuntimeError):
    """Something that the person who asked should read, without a traceback."""


class NotAvailable(ClusterError):
    """This machine cannot run such a cluster, and why."""
