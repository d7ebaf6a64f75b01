"""Claims units and supervises the processes that run them."""
