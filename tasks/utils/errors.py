"""What a user did wrong."""


class UserError(ValueError):
    """Bad input. One `error: ...` line, no traceback of ours, and each rank exits with code 2."""
