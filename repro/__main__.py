"""`python -m repro`: see repro.cli."""

import sys


def run() -> int:
    """The command line's exit status; a sentence where this Python lacks what set-up installs."""
    try:
        from repro.cli import main

        return main()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "repro":
            raise
        print(
            f"repro: {error.name} is not installed for {sys.executable}; run `make setup`, or `python3 -m "
            "repro.setup.bootstrap` and then .venv/bin/python -m repro ...",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":  # worker processes import this module and must not start over
    sys.exit(run())
