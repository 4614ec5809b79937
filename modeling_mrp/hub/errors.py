"""The one exception that the commands of this package turn into a message without a traceback."""


class HubError(ValueError):
    """Something about a checkpoint, a folder or a request that the user can put right; the message says how."""
