"""What a user did wrong."""


class UserError(ValueError):
    """Bad input. One `error: ...` line, no traceback of ours, and each rank exits with code 2."""


def one_line(error):
    """Return a library error's message in one line, or its repr: a KeyError's message is a key."""
    said = " ".join(str(error).split())
    return repr(error) if isinstance(error, LookupError) or not said else said
