"""Take a picture of the top of a page, as Chromium draws it.

    python -m reports.screenshot PAGE.html PICTURE.png
    python -m reports.screenshot PAGE.html PICTURE.png width=390 height=844 dark=true

PAGE.html: a file, or an address. PICTURE.png has 256 colours at most, which keeps it small.

    width     pixels, 1200
    height    pixels, 1500
    dark      false

It needs Chromium (Debian: apt-get install chromium), or what CHROMIUM names. Exit code: 0, or 2 where there is no browser, or
the page or the picture is none.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from cli.command import command
from cli.errors import ConfigError, Refused
from cli.files import write_whole
from cli.limits import shown

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MOST_PX, NUM_COLOURS = 8192, 256
LIMIT_SEC = 60.0


def find_browser() -> str | None:
    """Return the program of a Chromium, or None where there is none."""
    return shutil.which(os.environ.get("CHROMIUM", "")) or next(filter(None, map(shutil.which, BROWSERS)), None)


def words_for_browser() -> list[str]:
    """Return the words without which it does not start in a container: root has no sandbox, /dev/shm may be small."""
    return ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]


def take(address: str, width: int, height: int, *, is_dark: bool) -> Image.Image:
    """Return the picture. Raises Refused: there is no browser, or it draws nothing."""
    program = find_browser()
    if program is None:
        named = (
            "CHROMIUM names none that there is"
            if os.environ.get("CHROMIUM")
            else f"none of {', '.join(BROWSERS)} is there"
        )
        raise Refused(
            f"browser: {named}. Possible: Chromium. Install it (Debian: apt-get install chromium), or name it by CHROMIUM=."
        )
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder, "page.png")
        how = [
            "--headless",
            "--disable-gpu",
            "--hide-scrollbars",
            *words_for_browser(),
            f"--user-data-dir={folder}/own",
        ]
        how += [
            f"--window-size={width},{height}",
            f"--screenshot={picture}",
            *(["--force-dark-mode"] if is_dark else []),
        ]
        try:
            subprocess.run([program, *how, address], capture_output=True, timeout=LIMIT_SEC, check=True)
            content = picture.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            raise Refused(
                f"browser: {program} draws nothing of {address}: {type(error).__name__}. Open the page in it to see why."
            ) from error
    return Image.open(io.BytesIO(content)).convert("RGB")


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    keys = {"width": "1200", "height": "1500", "dark": "false"}
    given = dict(word.split("=", 1) for word in argv if word.partition("=")[0] in keys)
    places = [word for word in argv if word.partition("=")[0] not in keys]
    keys |= given
    problems = []
    if len(places) != 2:
        problems.append(f"command line: {len(places)} given. Possible: two places. Give PAGE.html PICTURE.png.")
    elif "://" not in places[0] and not Path(places[0]).is_file():
        problems.append(
            f"{places[0]}: no such file. Possible: a page, or its address. python -m reports.page writes one."
        )
    for key in ("width", "height"):
        if not (keys[key].isdecimal() and 1 <= int(keys[key]) <= MOST_PX):
            problems.append(f"{key}: '{shown(keys[key])}'. Possible: 1 to {MOST_PX:,}. Give such a number.")
    if keys["dark"] not in ("true", "false"):
        problems.append(f"dark: '{shown(keys['dark'])}'. Possible: true, false. Give one.")
    if problems:
        raise ConfigError(problems)
    address = places[0] if "://" in places[0] else Path(places[0]).resolve().as_uri()
    picture = take(address, int(keys["width"]), int(keys["height"]), is_dark=keys["dark"] == "true")
    file = io.BytesIO()
    picture.quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    try:
        Path(places[1]).parent.mkdir(parents=True, exist_ok=True)
        write_whole(Path(places[1]), file.getvalue())
    except OSError as error:
        raise Refused(f"{places[1]}: cannot be written: {error.strerror}. Give another place.") from error
    print(f"written: {places[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
