"""The parts of a job, one module a topic. `eagle3_core.jobs.spec` puts them together and is where others import them."""
