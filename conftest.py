"""Settings of every test: hypothesis judges no wall-clock time, and prints how to repeat what it found."""

from hypothesis import settings

settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")
