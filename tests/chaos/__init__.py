"""Chaos: a cluster of real parts, seeded blows while a job runs, and what must hold whatever was hit.

    PYTHONPATH=tests python -m chaos --runs 50        make chaos RUNS=50

`cluster` starts the parts once; `parts` are what can be hit, each with its own blows; `schedule` draws a run from its
seed; `invariants` says what must be true afterwards. One house serves all runs, so what a run leaves behind meets the next;
it starts anew where a round of all blows begins whose workers hold no key to the store, or hold one again.
"""
