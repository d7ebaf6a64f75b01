"""What workers ask of the API. Not for people: it may change with every version."""
