"""`python -m vecgym` is the command `vecgym`."""

import sys

from vecgym.cli import main

if __name__ == "__main__":
    sys.exit(main())
