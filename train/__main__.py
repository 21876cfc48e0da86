"""`python -m selfspec.train RECIPE [key=value ...]`, also under `accelerate launch -m`."""

from __future__ import annotations

import logging
import sys

from selfspec.errors import SelfspecError
from selfspec.train.distributed import disconnect
from selfspec.train.recipe import load_recipe
from selfspec.train.run import Interrupted, train


def main(arguments: list[str]) -> int:
    """Train by recipe; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m selfspec.train RECIPE [key=value ...]", file=sys.stderr)
        return 0 if arguments else 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(train(load_recipe(arguments[0], arguments[1:])))
        disconnect()
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 130
    except SelfspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
