"""The entry point of `ludus` and `python -m ludus`."""

import sys

from ludus.cli.signals import exit_on_interrupt


def main() -> int:
    """Run the command line. An interrupt during the imports ends the process with one line."""
    with exit_on_interrupt():
        from ludus.cli.main import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
