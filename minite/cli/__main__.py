"""`python -m minite.cli`."""

import sys

from minite.cli import main

if __name__ == "__main__":
    sys.exit(main())
