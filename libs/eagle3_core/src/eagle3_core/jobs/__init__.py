"""What a job is: its specification, its stages, its states, its keys, and what travels between API and worker."""
