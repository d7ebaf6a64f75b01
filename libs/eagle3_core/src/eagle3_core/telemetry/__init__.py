"""What processes report about themselves: log lines, metrics, traces. Free of torch, and of any service."""
