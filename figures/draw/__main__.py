"""Draw pictures of records.

python -m figures.draw                 # of all that are in figures/records/, into figures/
python -m figures.draw /tmp/mine.json  # of one like tp_speed, longest or diagrams, beside it
"""

import argparse
import json
from pathlib import Path

from figures import FIGURES, RECORDS
from figures.draw.kinds import FILES, draw_sequence_speed, kind, picture_of


def main():
    parser = argparse.ArgumentParser(
        prog="python -m figures.draw",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path, help="default all in figures/records/")
    files = parser.parse_args().files
    for file in files or [RECORDS / f"{name}.json" for name in FILES]:
        try:
            data = json.loads(file.read_text())
            draw = kind(data)
        except (OSError, ValueError) as error:
            parser.error(f"{file}: {error}")
        draw(data, picture_of(file))
    if not files:
        names = "ulysses_speed", "long_speed"
        both = {name: json.loads((RECORDS / f"{name}.json").read_text()) for name in names}
        draw_sequence_speed(both, FIGURES / "sequence_speed.png")


if __name__ == "__main__":
    main()
