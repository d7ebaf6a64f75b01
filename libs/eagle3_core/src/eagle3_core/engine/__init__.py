"""SGLang as the house runs it: its configuration, its server process, many requests in flight.

Nothing here imports SGLang: it lives in an environment of its own, and is spoken to over HTTP.
"""
