"""Who works on what: units are planned, claimed, kept by heartbeats, committed, or taken back."""
