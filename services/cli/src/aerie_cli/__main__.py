"""`python -m aerie_cli` is `aerie`."""

from aerie_cli.main import app

if __name__ == "__main__":
    app(prog_name="aerie")
