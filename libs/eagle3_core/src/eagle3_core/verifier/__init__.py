"""The large model: who it is, how it is run, which layers are captured, and the contract that says so."""
