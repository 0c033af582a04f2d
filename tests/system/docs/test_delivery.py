"""A real experiment for each row of the tables in docs/delivery.md.

The experiments are in `delivery_calls`, `delivery_tasks`, `delivery_blocked` and, for sentences outside of the tables,
in `delivery_prose`. Each names the rows that it checks by their first cells. It makes the event of the row happen with
real workers, and checks how often the function has run, what its caller gets, and what `retries` change. The exceptions
that callers got must be those that the row names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite(
    "tests.system.docs.delivery_calls",
    "tests.system.docs.delivery_tasks",
    "tests.system.docs.delivery_blocked",
    "tests.system.docs.delivery_prose",
)

from headgate.testing import no_leaks  # noqa: E402
from tests.conftest import SCALE  # noqa: E402
from tests.support.combined.combined_support import Apart  # noqa: E402
from tests.system.docs import delivery_blocked, delivery_calls, delivery_prose, delivery_tasks  # noqa: E402, F401
from tests.system.docs.delivery_lab import BLOCKED, EXPERIMENTS, GUIDE, PROSE, Experiment, Lab, named_in, tables_of  # noqa: E402

TABLES = tables_of(GUIDE.read_text("utf-8"))


@pytest.fixture(scope="module")
def shared() -> Iterator[Apart]:
    """Two workers for all short experiments. An experiment may kill them; the next one waits for new workers."""
    shared = Apart(spawn=2, lazy=False)
    shared.open()
    yield shared
    shared.close()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Files and threads are not checked, because the shared pool replaces killed workers and their connections."""
    with no_leaks(files=False, threads=False):
        yield


# -- the tables and the experiments belong together -------------------------------------------------------------------


def test_every_row_has_an_experiment_and_every_experiment_a_row() -> None:
    shown = {heading: {row for one in EXPERIMENTS if one.heading == heading for row in one.rows} for heading in TABLES}
    assert shown == {heading: set(rows) for heading, rows in TABLES.items()}
    assert {one.heading for one in EXPERIMENTS} == {*TABLES, PROSE}


def test_a_row_without_an_experiment_is_seen() -> None:
    text = "## One\n\n| what | so |\n|---|---|\n| it returns | `WorkerLost` |\n| it raises | no |\n\n## Two\n\ntext\n"
    assert tables_of(text) == {"One": {"it returns": ["`WorkerLost`"], "it raises": ["no"]}}
    assert named_in(["`WorkerLost` or CancelledError, and `task`"]) == {"WorkerLost", "CancelledError"}


def check_names(one: Experiment, lab: Lab) -> None:
    """Check that callers got exactly the exceptions that the row names; with several experiments, no others."""
    if one.heading not in TABLES:
        return
    skipped = 0 if one.heading == BLOCKED else 1  # the cell "has it run?" names nothing that a caller gets
    named = named_in([cell for row in one.rows for cell in TABLES[one.heading].get(row, [])[skipped:]])
    first = next(other for other in EXPERIMENTS if set(other.rows) & set(one.rows) and other.heading == one.heading)
    assert lab.got <= named, f"{one.name}: the row does not name {sorted(lab.got - named)}"
    if one is first and one.complete:
        assert lab.got == named, f"{one.name}: the row names {sorted(named - lab.got)}, and nobody got it"


# -- the experiments --------------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("experiment", [pytest.param(one, id=one.name) for one in EXPERIMENTS if not one.apart])
def test_it_is_as_the_row_says(experiment: Experiment, shared: Apart, tmp_path: Path) -> None:
    lab = Lab(tmp_path / "log", shared.pool)
    shared(lambda: experiment.body(lab), patience=90)
    check_names(experiment, lab)


@pytest.mark.integration
def test_it_is_as_the_row_says_with_workers_apart(shared: Apart, tmp_path: Path) -> None:
    """Experiments with their own workers, eight at a time: one after the other they would take minutes."""
    apart = [one for one in EXPERIMENTS if one.apart and (SCALE >= 1 or not one.soak)]
    labs = [Lab(tmp_path / one.name, shared.pool) for one in apart]
    places = asyncio.Semaphore(8)

    async def named(one: Experiment, lab: Lab) -> None:
        try:
            async with places:
                await one.body(lab)
            check_names(one, lab)
        except BaseException as error:
            error.add_note(f"in the experiment {one.name}, for {one.rows}")
            raise

    async def main() -> list[Any]:
        return await asyncio.gather(*map(named, apart, labs), return_exceptions=True)

    failures = [found for found in shared(main, patience=150) if found is not None]
    if failures:
        raise BaseExceptionGroup("experiments that did not go as the document says", failures)
