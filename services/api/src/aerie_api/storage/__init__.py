"""The object store as the API keeps it: what is held, what is let go, what is deleted on request."""
