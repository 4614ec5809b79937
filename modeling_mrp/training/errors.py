"""The exception that the training command turns into a message without a traceback."""


class TrainingError(ValueError):
    """Something about the configuration or the data that the user can put right; the message says how."""
