"""The command `distbelief`, as `python -m distbelief`."""

from distbelief.cli.main import main

if __name__ == "__main__":
    main()
