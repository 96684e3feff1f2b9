"""`python -m distbelief`: the command of that name."""

import sys

from distbelief.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
