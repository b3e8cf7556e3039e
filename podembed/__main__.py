"""`python -m podembed`: the command line."""

from podembed.jobs.cli.main import main

if __name__ == "__main__":
    main()
