"""`python -m horoclone.launch` is horoclonerun, for a machine whose scripts folder is not on PATH."""

import sys

from horoclone.launch.cli import main

sys.exit(main())
