"""The fleet as people see it: who asked for work, who is at it, who was set aside."""
