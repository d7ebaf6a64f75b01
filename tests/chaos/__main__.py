"""`PYTHONPATH=tests python -m chaos --runs 50 [--seed 0]`: prints a line for every run and `50 of 50` at the end.

A run that breaks a rule ends the series: its line has the seed, and `--seed N --runs 1` repeats it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from test_kills import small_job

from chaos.cluster import running_cluster
from chaos.runs import run, undisturbed


def main(arguments: list[str]) -> int:
    """Run the series; 0 if every run held."""
    parser = argparse.ArgumentParser(prog="python -m chaos")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="the first run's")
    parser.add_argument("--keep", type=Path, help="folder to leave the house in, for a look after a failure")
    options = parser.parse_args(arguments)
    held = 0
    with tempfile.TemporaryDirectory(prefix="aerie-chaos-") as scratch:
        folder = options.keep or Path(scratch)
        (folder / "inputs").mkdir(parents=True)
        document = small_job(folder / "inputs")
        with running_cluster(folder, folder / "inputs") as cluster:
            reference = undisturbed(cluster, document)
            try:
                for seed in range(options.seed, options.seed + options.runs):
                    sys.stdout.write(run(cluster, document, reference, seed).line() + "\n")
                    sys.stdout.flush()
                    held += 1
            finally:
                sys.stdout.write(f"{held} of {options.runs}\n")
                sys.stdout.flush()
    return 0 if held == options.runs else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
