"""`python -m ludus`: the command line."""

import sys

from ludus.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
