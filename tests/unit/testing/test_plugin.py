"""The plugin for pytest, in runs of pytest of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> object:
    """Run the tests of a text, as if the plugin were installed, and return the result."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess("-p", "headgate.testing.plugin", "--strict-markers", *options)

    return run


def test_c32_async_tests_run_on_the_virtual_loop(run) -> None:  # type: ignore[no-untyped-def]
    result = run(
        """
        import asyncio, pytest
        from headgate import ResourcePool
        from headgate.testing import VirtualLoop

        async def test_by_fixture(headgate_loop):
            await asyncio.sleep(3600)
            assert headgate_loop.time() == 3600
            ran = []
            asyncio.get_running_loop().call_soon(ran.append, 1)
            await headgate_loop.settle()
            assert ran and isinstance(asyncio.get_running_loop(), VirtualLoop)

        @pytest.mark.headgate_loop(start=100)
        @pytest.mark.parametrize("seconds", [1, 2])
        async def test_by_mark(tmp_path, seconds):
            assert tmp_path.exists()
            await asyncio.sleep(seconds)
            assert asyncio.get_running_loop().time() == 100 + seconds

        @pytest.mark.headgate_loop(start=7)
        class TestClass:
            @pytest.mark.headgate_loop(check_leaks=False)
            async def test_options_of_both(self):
                self.left = asyncio.ensure_future(asyncio.sleep(60))
                assert asyncio.get_running_loop().time() == 7

            def test_that_is_not_async(self, headgate_loop):
                async def main():
                    await asyncio.sleep(1)
                    return headgate_loop.time()
                assert headgate_loop.run(main) == 8
                assert headgate_loop.run(main(), start=1) == 2
        """
    )
    result.assert_outcomes(passed=5)


def test_c32_a_hang_and_a_leak_fail_the_test(run) -> None:  # type: ignore[no-untyped-def]
    result = run(
        """
        import asyncio, pytest
        pytestmark = pytest.mark.headgate_loop

        async def test_hangs():
            await asyncio.Event().wait()

        async def test_leaks():
            asyncio.get_running_loop().left = asyncio.ensure_future(asyncio.sleep(60))

        @pytest.mark.headgate_loop(sed=3)
        async def test_misspelt():
            pass

        @pytest.mark.headgate_loop(3)
        async def test_positional():
            pass
        """
    )
    result.assert_outcomes(failed=4)
    text = result.stdout.str()
    assert "nothing is ready, no timer is set" in text
    assert "1 task still pending when main returned" in text
    assert "sed" in text
    assert "takes options by name, got 3" in text


def test_c32_events_of_the_test_are_captured(run) -> None:  # type: ignore[no-untyped-def]
    result = run(
        """
        from headgate import TaskPool

        async def work():
            pass

        async def test_events(headgate_loop, headgate_events):
            assert headgate_events == []
            async with TaskPool() as pool:
                await (await pool.submit(work))
            assert headgate_events.names[0] == "pool_submit", headgate_events
            headgate_events.clear()

        def test_each_has_its_own(headgate_events):
            assert not headgate_events
        """
    )
    result.assert_outcomes(passed=2)


def test_c32_what_is_left_behind_fails_the_test(run) -> None:  # type: ignore[no-untyped-def]
    result = run(
        """
        import pytest, threading
        pytestmark = pytest.mark.headgate_leaks(grace=0)
        left = []

        def test_tidy(headgate_leaks):
            open(__file__).close()

        def test_leaves_a_file(headgate_leaks):
            left.append(open(__file__))

        @pytest.mark.headgate_leaks(files=False)
        def test_may_leave_a_file(headgate_leaks):
            left.append(open(__file__))

        def test_is_not_checked():
            left.append(open(__file__))

        def teardown_module():
            while left:
                left.pop().close()
        """
    )
    result.assert_outcomes(passed=4, errors=1)
    assert "1 left behind" in result.stdout.str()


def test_c32_other_tests_are_left_alone(run) -> None:  # type: ignore[no-untyped-def]
    result = run("async def test_of_another_plugin(): pass\ndef test_plain(): pass\n")
    assert "async def functions are not natively supported" in result.stdout.str()
    assert result.parseoutcomes()["passed"] == 1


def test_c32_marks_and_fixtures_are_listed(run) -> None:  # type: ignore[no-untyped-def]
    assert "@pytest.mark.headgate_loop(**options):" in run("", "--markers").stdout.str()
    listed = run("", "--fixtures").stdout.str()
    for name in ("headgate_loop", "headgate_events", "headgate_leaks"):
        assert name in listed


def test_c32_it_is_an_entry_point_and_may_be_named_twice(pytester: pytest.Pytester) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    [(name, module)] = project["entry-points"]["pytest11"].items()
    assert name == module == "headgate.testing.plugin", "pytest refuses a plugin that it meets under two names"
    pytester.makeconftest("pytest_plugins = ['headgate.testing.plugin']")
    pytester.makepyfile("def test_it(headgate_events): pass")
    pytester.runpytest_inprocess("-p", "headgate.testing.plugin").assert_outcomes(passed=1)


def test_c32_it_costs_nothing_when_it_is_not_used() -> None:
    """Of headgate only what `import headgate` needs is imported, and nothing of grpc."""
    code = """
        import json, sys
        import pytest
        before = set(sys.modules)
        import headgate
        bare = set(sys.modules)
        import headgate.testing.plugin
        print(json.dumps([sorted(bare - before), sorted(set(sys.modules) - bare)]))
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    out = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    bare, more = json.loads(out.stdout)
    assert more == ["headgate.testing", "headgate.testing.plugin"]
    assert "grpc" not in bare
    assert len(bare) < 20, bare
