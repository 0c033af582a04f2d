"""``python -m headgate``: the command `headgate`."""

import sys

from headgate.cli.main import main

sys.exit(main())
