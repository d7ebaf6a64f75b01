"""The training loop around one step: data feed, optimizer, checkpoints."""
