"""`python -m cleanba` is the command `cleanba`."""

from cleanba.cli import main

if __name__ == "__main__":
    main()
