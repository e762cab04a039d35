"""Copies of tasks/ with one wrong place: where that place is, whatever its names are today.

A bug is two pieces of code, the right one and the wrong one. The right one is looked for by its
tokens, not by its text: line breaks, comments and a last comma do not count, and a name may be any
other name, the same wherever the bug says the same. So no bug is lost when something is renamed or
formatted anew. Of several such places the one counts that has the most of the names.
"""

import builtins
import functools
import keyword
import re

import launch

TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)
      | (?P<text>[rbfRBF]{0,2}(?:\"\"\"(?:.|\n)*?\"\"\"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
      | (?P<number>\d[\w.]*)
      | (?P<name>\w+)
      | (?P<sign>->|\*\*|//|:=|[-+*/@%&|^<>=!]=|<<|>>|[^\w\s])""",
    re.VERBOSE,
)
FIXED = {*keyword.kwlist, *dir(builtins), "self", "torch", "dist"}  # names that never change


def plant(folder, file, old, new, count=1):
    """A copy of tasks/ in which one place of one file, wherever that is, reads differently.

    count: how many such places there are, all of which change.
    """
    launch.copy_tasks(folder)
    (path,) = [path for path in folder.rglob(file) if not path.is_symlink()]
    write(path, replace(path.read_text(), old, new, count))


def write(path, text):
    """Another text, of which nothing is compiled yet."""
    path.write_text(text)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def replace(text, old, new, count=1):
    """The text with `new` where `old` is. ValueError where that is not so many times there."""
    exact = re.compile(whole_words(old))
    if len(exact.findall(text)) == count:
        return exact.sub(lambda match: new, text)
    places = find(text, old)
    if len(places) != count:
        raise ValueError(f"{len(places)} times instead of {count}: {old!r}")
    before, after = outer_space(old, new)
    inner = new[len(before) : len(new) - len(after)]
    indent = old[len(before) : len(old) - len(old[len(before) :].lstrip())]
    for start, stop, names in reversed(places):
        start -= len(indent) * text.endswith(indent, 0, start)
        text = text[:start] + renamed(inner, names) + text[stop:]
    return text


def whole_words(old):
    """A pattern for this text that neither begins nor ends within a word."""
    before = r"(?<!\w)" if re.match(r"\w", old) else ""
    after = r"(?!\w)" if re.search(r"\w$", old) else ""
    return before + re.escape(old) + after


def outer_space(old, new):
    """The blanks and line breaks that both begin with, and both end with."""
    before = common_blanks(old, new)
    after = common_blanks(old[::-1], new[::-1])[::-1] if new.strip() else ""
    return before, after


def common_blanks(one, other):
    """Those that two texts begin with."""
    count = 0
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs or not ours.isspace():
            break
        count += 1
    return one[:count]


def renamed(code, names):
    """The code with these names, {old: new}, for its own; texts and comments stay."""

    def one(match):
        return names.get(match[0], match[0]) if match.lastgroup == "name" else match[0]

    return TOKEN.sub(one, code)


def find(text, old):
    """Where the code `old` is: [(start, stop, {its name: the name there})], the best of them."""
    wanted = [(kind, word) for kind, word, *_ in tokens(old)]
    there = tokens(text)
    matches = []
    for first in range(len(there)):
        names = match(wanted, there, first)
        if names is not None:
            same = sum(ours == theirs for ours, theirs in names.items())
            stop = there[first + len(wanted) - 1][3]
            matches.append((same, there[first][2], stop, names))
    most = max((same for same, *_ in matches), default=0)
    return [place for same, *place in matches if same == most]


def match(wanted, there, first):
    """The names, {wanted: there}, if the tokens from `first` on are those wanted; else None."""
    if first + len(wanted) > len(there):
        return None
    names = {}
    for place, (kind, word) in enumerate(wanted, first):
        kind_there, word_there, *_ = there[place]
        if kind != kind_there:
            return None
        if kind != "name" or word in FIXED or word_there in FIXED:
            if word != word_there:
                return None
        elif names.setdefault(word, word_there) != word_there:
            return None
    return names if len(set(names.values())) == len(names) else None


@functools.lru_cache(maxsize=100)
def tokens(code):
    """[(kind, text, start, stop)] of Python, also of a piece of it; no last comma in brackets."""
    found = []
    for token in TOKEN.finditer(code):
        if token.lastgroup == "skip":
            continue
        if token[0] in ")]}" and found and found[-1][1] == ",":
            found.pop()
        found.append((token.lastgroup, token[0], *token.span()))
    return found
