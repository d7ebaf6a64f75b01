"""What processes say of themselves: log lines, metrics, traces. Free of torch, and of any service."""
