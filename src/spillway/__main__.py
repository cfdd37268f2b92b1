"""The `spillway` command, also as `python -m spillway`: what it is made of is imported where Ctrl-C is understood."""

import sys


def main() -> None:
    """Run the command line of this process and exit with its code."""
    try:
        from spillway.cli.main import run
    except KeyboardInterrupt:
        print("spillway: stopped before anything was begun", file=sys.stderr)
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
