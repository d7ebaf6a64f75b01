"""The commands of docs/storage.md do what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from eagle3_core.objects.s3_address import FIELDS, s3_address

PAGE = (Path(__file__).parents[1] / "docs/storage.md").read_text()


def test_the_probe_command_says_what_a_store_can_do(tmp_path: Path):
    command = re.search(r"^    python (-c .*)$", PAGE, re.M)
    assert command is not None
    code = command[1].removeprefix("-c ").strip("'")

    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True,
        env={**os.environ, "AERIE_STORE": tmp_path.as_uri()},
    )  # fmt: skip

    assert ran.stdout.startswith("multipart yes, conditional put no")


def test_the_locations_of_the_page_are_locations():
    places = [s3_address(line.strip()) for line in PAGE.splitlines() if line.startswith("    s3://")]

    assert [place.bucket for place in places] == ["aerie-states", "aerie-states"]


def test_the_page_describes_every_field_of_a_location():
    assert sorted(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) == sorted(FIELDS)
