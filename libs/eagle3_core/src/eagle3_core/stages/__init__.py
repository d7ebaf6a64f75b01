"""The stages of a job, each a pure function of its inputs and its configuration."""
