"""The control plane: jobs, leases, REST."""
