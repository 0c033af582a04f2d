"""Workers on hosts, without an engine: the contract of placements, certificates, and hosts that are killed."""

from __future__ import annotations

import pytest

from headgate.testing import check_placement
from headgate.workers.processes.engine_placement import EnginePlacement
from tests.engines.subprocesses import Subprocesses

pytestmark = pytest.mark.integration


def test_p01_a_placement_on_hosts_keeps_the_contract() -> None:
    check_placement(lambda workers: EnginePlacement(Subprocesses(), workers), patience=30)
