"""`python -m tests.simulation`: see `campaign`."""

from tests.simulation.campaign import main

if __name__ == "__main__":
    raise SystemExit(main())
