"""Where bytes live: one protocol, its adapters, and the write-once manifests that make bytes count."""
