"""The small model: its parameters, which positions train, one training step, its exports."""
