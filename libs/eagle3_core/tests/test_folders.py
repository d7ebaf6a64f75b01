"""The cache is where the user says, and everybody looks there."""

from pathlib import Path

import pytest

from eagle3_core.folders import cache_folder


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"AERIE_CACHE": "/a", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/aerie"),
        ({"HOME": "/h"}, "/h/.cache/aerie"),
        ({"AERIE_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/aerie"),
    ],
)
def test_the_users_word_comes_first(monkeypatch, environment, folder):
    for name in ("AERIE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert cache_folder() == Path(folder)
