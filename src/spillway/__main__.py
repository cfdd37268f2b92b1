"""`python -m spillway`."""

from spillway.cli.main import main

main()
