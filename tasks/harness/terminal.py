"""Colours and bold type, where a person reads along in a terminal."""

import os
import sys

CODES = {"bold": 1, "red": 31, "green": 32}


def styled(text, style):
    """Return the text in a style of CODES, or unchanged where codes do not belong.

    That is in a file or a pipe, where NO_COLOR is set (no-color.org), and on a terminal that knows
    no codes, TERM=dumb.
    """
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if plain or not sys.stdout.isatty():
        return text
    return f"\033[{CODES[style]}m{text}\033[0m"
