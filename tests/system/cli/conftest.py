"""What the tests of the command line share."""

from __future__ import annotations

import sys

from tests.support.cli.support import HERE
from tests.support.workers.warm_programs import programs_start_warm, template_of_programs  # noqa: F401 - fixtures

sys.path.append(str(HERE))  # `cli_jobs` has the same name here and on the workers
