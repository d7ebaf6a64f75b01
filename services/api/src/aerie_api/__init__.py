"""The control plane: takes jobs, plans their units, leases them to workers, and tells people how they fare."""
