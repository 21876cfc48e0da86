"""`python -m selfspec`."""

from selfspec.cli import main

main()
