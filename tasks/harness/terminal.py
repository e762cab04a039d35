"""Colours and bold type, where a person reads along in a terminal."""

import os
import sys

CODES = {"bold": 1, "red": 31, "green": 32}


def styled(text, style):
    """The text in a style of CODES; as it is in a file or a pipe, and where NO_COLOR is set.

    (no-color.org; TERM=dumb says that a terminal knows no codes.)
    """
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if plain or not sys.stdout.isatty():
        return text
    return f"\033[{CODES[style]}m{text}\033[0m"
