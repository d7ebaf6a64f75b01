"""Finished drafters."""
