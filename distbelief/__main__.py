"""`python -m distbelief`: the command of that name."""

from distbelief.cli.main import main

if __name__ == "__main__":
    main()
