"""The verifier on unmodified SGLang: a plug-in that captures hidden states, and the launcher of the server."""

__version__ = "0.1.0"
