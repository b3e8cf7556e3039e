"""Which packages the program has; everything else about it is in pyproject.toml.

The packages are counted here from the folders themselves. The links in `podembed/` cannot be counted on: a source
archive has none, and a clone on a file system without links has text files in their place.
"""

from setuptools import find_packages, setup

FLOORS = ("embedding", "workers", "orchestrator", "serving", "tools", "jobs")

setup(
    packages=[
        "podembed",
        "podembed.docs",
        *(f"podembed.{name}" for floor in FLOORS for name in find_packages(include=[floor, f"{floor}.*"])),
    ]
)
