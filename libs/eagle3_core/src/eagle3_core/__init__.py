"""The EAGLE-3 library: tokens, hidden states, drafters. It knows no HTTP, no queue, no cluster."""
