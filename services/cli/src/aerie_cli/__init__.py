"""The aerie command."""
