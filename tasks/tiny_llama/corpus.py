"""The text that the tiny model is trained on: an endless, seeded stream of simple stories.

Nothing here is copied from anywhere. A document is drawn in three steps: pick a shape from
`shapes.txt`, cast the people, animals, places and things that it may need (`words.txt`), and fill
the shape in. The shapes are written in a small notation:

    [a|b|c]    one of the alternatives, by chance; they nest, and may be empty
    <is|was>   the first in a story told in the present tense, the second in the past tense
    {h.name}   a slot, filled from the cast, the same wherever it appears in the story
    @opening   the phrase of that name
    ? ...      a line that half of the stories leave out
    / ...      a line that begins a new line of the story too
    ! ...      a line for the first chapter only

`prose.txt` holds some pages of ordinary prose, written for this project too. Only the standard
library is used, and the same seed gives the same text everywhere. `python corpus.py` prints a few
stories.
"""

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
END_OF_TEXT = "<|endoftext|>"

Node = str | tuple[str, list[list]]  # text, or "[" or "<" with its alternatives


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _sections(name: str) -> Iterator[tuple[list[str], str]]:
    """Yield the headings (their words) and the bodies of one of the text files beside this one."""
    _, *parts = re.split(r"^([@=] .*)\n", (HERE / name).read_text("utf-8"), flags=re.M)
    for heading, body in zip(parts[::2], parts[1::2], strict=True):
        yield heading.split(), body.strip()


def _read_words() -> dict[str, list]:
    """Return the lists and the tables (lists of rows) of `words.txt`."""
    words = {}
    for (_, name), body in _sections("words.txt"):
        if ";" in body:
            words[name] = [row.split("; ") for row in body.splitlines()]
        else:
            words[name] = " ".join(body.split()).split(", ")
    return words


def _parse(template: str, phrases: dict[str, Node]) -> list[Node]:
    """Turn a template into a tree once, so that filling it in is quick."""
    stack = [("", [[]])]
    for token in re.findall(r"@\w+|[^@\[\]<>|]+|.", template):
        if token[0] == "@":
            stack[-1][1][-1].append(phrases[token[1:]])
        elif token in "[<":
            stack.append((token, [[]]))
        elif token in "]>":
            done = stack.pop()
            stack[-1][1][-1].append(done)
        elif token == "|":
            stack[-1][1].append([])
        else:
            stack[-1][1][-1].append(token)
    ((_, (tree,)),) = stack
    return tree


def _read_shapes() -> tuple[list[list[tuple[str, list[Node]]]], list[int]]:
    """Return the shapes (lists of a line's marks and its tree) and their running weights."""
    phrases, shapes, weights = {}, [], []
    for (mark, name, *weight), body in _sections("shapes.txt"):
        if mark == "@":
            (phrases[name],) = _parse(f"[{body}]", phrases)
            continue
        lines = [re.fullmatch(r"([?/! ]*)(.*)", line).groups() for line in body.splitlines()]
        shapes.append([(marks, _parse(line, phrases)) for marks, line in lines])
        weights.append(int(weight[0]))
    return shapes, list(itertools.accumulate(weights))


WORDS = _read_words()
SHAPES, WEIGHTS = _read_shapes()


def _row(table: str, row: list[str]) -> SimpleNamespace:
    """Name the cells of a row; a capitalised name gives the same words capitalised."""
    columns = {
        "animals": "kind says said home food can look size",
        "places": "to at sights",
        "kin": "kind he him his",
        "crafts": "thing stuff one two use",
        "noises": "sound cause",
        "jobs": "kind does did must tool",
        "coloured": "thing colour",
    }[table].split()
    cells = dict(zip(columns, row, strict=True))
    return SimpleNamespace(**cells, **{_capital(key): _capital(cells[key]) for key in cells})


TABLES = {
    name: [_row(name, row) for row in WORDS[name]]
    for name in ("animals", "places", "kin", "crafts", "noises", "jobs", "coloured")
}


def _some(rng: random.Random, words: list, count: int) -> list:
    """Choose different words, the earlier in the list the likelier, as it is in any language."""
    chosen = []
    while len(chosen) < count:
        word = words[int(len(words) * rng.random() ** 2)]
        if word not in chosen:
            chosen.append(word)
    return chosen


def _people(rng: random.Random, count: int, animals: bool) -> list[SimpleNamespace]:
    """Return people with different names; if `animals`, most of them are animals."""
    people, names = [], set()
    for animal in rng.sample(TABLES["animals"], count):
        girl = rng.random() < 0.5
        choose = _some if people else random.Random.sample  # a hero may have any name
        if animals and (not people or rng.random() < 0.7):
            (name,), kind = choose(rng, WORDS["pets"], 1), animal.kind
        else:
            kinds = ("girl", "girl", "girl", "woman") if girl else ("boy", "boy", "boy", "man")
            (name,) = choose(rng, WORDS["girls" if girl else "boys"], 1)
            kind = rng.choice(kinds)
        if name in names:
            return _people(rng, count, animals)
        names.add(name)
        he, him, his = ("she", "her", "her") if girl else ("he", "him", "his")
        person = SimpleNamespace(name=name, kind=kind, he=he, him=him, his=his)
        person.He, person.His = he.capitalize(), his.capitalize()
        person.trait = rng.choice(WORDS["traits"])
        grown_up = kind in ("woman", "man")
        person.age = rng.choice(
            ("thirty", "forty", "fifty") if grown_up else WORDS["numbers"][4:13]
        )
        people.append(person)
    return people


def _numbers(rng: random.Random) -> dict[str, str]:
    """Return n > m, their sum and difference, in words, and each with things: "two apples"."""
    names, item = WORDS["numbers"], rng.choice(WORDS["counted"])
    m, more = rng.randint(2, 6), rng.randint(2, 8)
    n = m + more
    cast = {"xs": item + "s", "n_next": names[n + 1], "counting": ", ".join(names[1 : n + 1])}
    for key, number in (("n", n), ("m", m), ("sum", n + m), ("diff", more)):
        cast[key], cast[key + "_xs"] = names[number], f"{names[number]} {item}s"
        cast[key.capitalize()] = names[number].capitalize()
    return cast


def _calendar(rng: random.Random) -> dict[str, str]:
    """Return days and months that follow each other, and weather that suits the season."""
    days, months, seasons = WORDS["days"], WORDS["months"], WORDS["seasons"]
    cast = {"t": rng.choice(("morning", "afternoon", "evening"))}
    day, season = rng.randrange(7), rng.randrange(4)
    for key, later in (("d", 0), ("d_next", 1), ("d2", 3), ("d3", 2), ("d_prev", 6)):
        cast[key] = days[(day + later) % 7]
    cast["season"], its_months, its_weather = seasons[season]
    cast["season_next"] = seasons[(season + 1) % 4][0]
    cast["mo"] = rng.choice(its_months.split(", "))
    cast["mo_next"] = months[(months.index(cast["mo"]) + 1) % 12]
    cast["w"], cast["w2"], cast["w_season"] = rng.sample(its_weather.split(", "), 3)
    return cast


def _cast(rng: random.Random, tense: int, people: list[SimpleNamespace]) -> dict[str, object]:
    """Choose everybody and everything that a shape may ask for, beside the people."""
    hero, friend, *others, kin = people
    cast = _calendar(rng) | _numbers(rng) | {"h": hero, "f": friend, "k": kin}
    for number, person in enumerate(rng.sample([hero, friend, *others], 4), 1):
        cast[f"g{number}"] = person
    cast["pet"] = rng.choice(WORDS["pets"])
    p, q, *two = (
        animal
        for animal in rng.sample(TABLES["animals"], 6)
        if animal.kind not in (hero.kind, friend.kind)
    )
    cast["p"], cast["q"], cast["p_says"] = p, q, (p.says, p.said)[tense]
    small, *_, big = sorted((p, q, *two), key=lambda animal: int(animal.size))
    cast["small"], cast["big"] = small, big
    cast["k2"] = rng.choice([other.kind for other in TABLES["kin"] if other is not kin])
    cast["l"], cast["l2"] = rng.sample(TABLES["places"], 2)
    cast["sight1"], cast["sight2"] = rng.sample(cast["l"].sights.split(", "), 2)
    cast["sight3"] = rng.choice(cast["l2"].sights.split(", "))
    (now,) = (row for row in WORDS["weather"] if row[0] == cast["w"])
    cast["now"], cast["now_present"] = now[1 + tense], now[1]
    for key in ("crafts", "noises", "jobs"):
        cast[key[:-1]] = rng.choice(TABLES[key])
    is_, was, what, fix = rng.choice(WORDS["troubles"])
    cast["tr"] = SimpleNamespace(be=(is_, was)[tense], what=what, fix=fix)
    for key, name, count in (
        ("o", "things", 3),
        ("c", "colours", 2),
        ("fd", "foods", 2),
        ("skill", "skills", 2),
        ("hide", "hiding", 4),
        ("op", "opposites", 3),
        ("tool", "tools", 3),
    ):
        for number, words in enumerate(_some(rng, WORDS[name], count), 1):
            cast[f"{key}{number}"] = words
    for number, row in enumerate(rng.sample(TABLES["coloured"], 3), 1):
        cast[f"x{number}"] = row
    for number in "123":
        cast["op" + number], cast[f"op{number}b"] = rng.sample(cast["op" + number].split("-"), 2)
        cast["tool" + number], cast[f"tool{number}_use"] = cast["tool" + number]
        cast["Hide" + number] = _capital(cast["hide" + number])
    cast["Fd1"], cast["Season_next"] = _capital(cast["fd1"]), _capital(cast["season_next"])
    cast["a"] = rng.choice(WORDS["adjectives"])
    cast["feel"], cast["bad"] = rng.choice(WORDS["feelings"]), rng.choice(WORDS["bad"])
    cast["bag"] = rng.choice(("basket", "bag", "box", "sack"))
    cast["meal"] = rng.choice(("breakfast", "lunch", "dinner", "supper"))
    return cast


def _fill(tree: list[Node], rng: random.Random, tense: int) -> str:
    parts = []
    for node in tree:
        if isinstance(node, str):
            parts.append(node)
        else:
            mark, choices = node
            parts.append(_fill(choices[tense] if mark == "<" else rng.choice(choices), rng, tense))
    return "".join(parts)


def _chapter(rng: random.Random, people: list[SimpleNamespace], tense: int, first: bool) -> str:
    (shape,) = rng.choices(SHAPES, cum_weights=WEIGHTS)
    chapter = ""
    for marks, tree in shape:
        if ("?" in marks and rng.random() < 0.5) or ("!" in marks and not first):
            continue
        chapter += ("\n" if "/" in marks else " ") + _fill(tree, rng, tense).strip()
    chapter = chapter.strip().format_map(_cast(rng, tense, people))
    chapter = re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", re.sub(" +", " ", chapter))
    chapter = re.sub(r'(?<!, )"[a-z]', lambda quoted: quoted[0].upper(), chapter)
    return _capital(chapter)


def _story(rng: random.Random) -> str:
    """Return a story: mostly of one chapter, sometimes of many about the same people."""
    people = [*_people(rng, 5, animals=rng.random() < 0.25), rng.choice(TABLES["kin"])]
    tense = int(rng.random() < 0.65)  # 0 is the present, 1 the past
    chapters = rng.choices((1, 2, 3, rng.randint(4, 12)), weights=(15, 2, 2, 1))[0]
    story = []
    for number in range(1, chapters + 1):
        heading = f"Chapter {WORDS['numbers'][number]}\n" if chapters > 3 else ""
        story.append(heading + _chapter(rng, people, tense, first=number == 1))
    return "\n\n".join(story)


def stories(seed: int) -> Iterator[str]:
    """Yield stories without end; the same seed always gives the same ones."""
    rng = random.Random(seed)
    while True:
        yield _story(rng)


def text(seed: int, num_chars: int, separator: str = END_OF_TEXT) -> str:
    """Return exactly `num_chars` characters of stories, each followed by `separator`."""
    parts, length = [], 0
    for story in stories(seed):
        if length >= num_chars:
            break
        parts.append(story + separator)
        length += len(parts[-1])
    return "".join(parts)[:num_chars]


def prose(held_out: bool = False) -> list[str]:
    """Return the paragraphs of `prose.txt`: every eighth is held out, the others are trained on."""
    paragraphs = (HERE / "prose.txt").read_text("utf-8").strip().split("\n\n")
    return [
        " ".join(paragraph.split())
        for number, paragraph in enumerate(paragraphs)
        if (number % 8 == 7) == held_out
    ]


if __name__ == "__main__":
    print("\n\n".join(itertools.islice(stories(seed=0), 10)))
