"""Measurements: the same work done by this library and by others, side by side."""
