"""`python -m ascendfactory`: the command line."""

from ascendfactory.cli import main

if __name__ == "__main__":
    main()
