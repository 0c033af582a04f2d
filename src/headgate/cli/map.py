"""`headgate map`: a function over every record of a file, resumable."""

from __future__ import annotations

import argparse
import os
import sys

from headgate.cli.arguments import name, whole
from headgate.cli.output import WrongCall, complain, print_json, say

TYPE_CHECKING = False  # see cli/main.py
if TYPE_CHECKING:
    from headgate.cli.batch.job import Ending

_FORMATS = ("jsonl", "csv", "parquet")
_DESCRIPTION = """\
Run a function over every record of a file, and write its results. The function is async or plain, and gets the record;
with --keys it gets a key before it.

After Ctrl-C, a crash or a reboot the same command picks up where it left off: no result is written twice, and none is
missing. Failed records are written to OUT.failed.jsonl with their errors.

The first Ctrl-C or SIGTERM lets running calls finish, the second one ends at once; the exit code is 130 or 143. It is 1
if a record has failed, or if the run could not go on, for example because the disk is full."""
_EXAMPLE = """\
example:
  headgate map jobs:ask prompts.jsonl -o answers.jsonl --keys keys.toml
  headgate map resize.py:resize images.csv -o sizes.csv --workers 4
  headgate map jobs:ask prompts.jsonl -o answers.jsonl --retry-failed
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.add_argument("function", metavar="FUNCTION", help="module:function or file.py:function")
    parser.add_argument("input", metavar="INPUT", help="JSON lines, CSV or Parquet, by its suffix; -: stdin")
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="the same; -: stdout, not resumable")
    parser.add_argument("--input-format", choices=_FORMATS, help="where the suffix does not tell")
    parser.add_argument("--output-format", choices=_FORMATS, help="the same for OUT")
    run = parser.add_argument_group("how it runs")
    run.add_argument("--max-concurrent", type=whole(1), default=10, metavar="N", help="records at a time (10)")
    run.add_argument("--workers", type=whole(1), metavar="N", help="on N worker processes")
    run.add_argument(
        "--keys",
        type=name,
        action="append",
        default=[],
        metavar="KEYS",
        help="a TOML file with keys, env:NAME, or command:...; repeatable",
    )
    run.add_argument(
        "--reserve",
        type=name,
        metavar="TOKENS",
        help="tokens that a record takes of the quota of its key: a field, or module:function of the record",
    )
    run.add_argument("--retries", type=whole(0), default=0, metavar="N", help="try a record that fails N times more")
    order = run.add_mutually_exclusive_group()
    order.add_argument("--fair", type=name, metavar="FIELD", help="in turn between the values of this field")
    order.add_argument("--priority", type=name, metavar="FIELD", help="the highest number in this field first")
    what = parser.add_argument_group("what it runs, and what it writes")
    what.add_argument("--limit", type=whole(1), metavar="N", help="only the first N records")
    what.add_argument("--id", type=name, metavar="FIELD", help="the field that names a record")
    what.add_argument("--cost", type=name, metavar="FIELD", help="the field of results that is summed up as cost")
    what.add_argument("--unordered", action="store_true", help="results as they finish, not in the order of INPUT")
    what.add_argument("--json", action="store_true", help="print the summary as JSON")
    again = parser.add_argument_group("if there was a run before").add_mutually_exclusive_group()
    again.add_argument("--restart", action="store_true", help="begin anew: OUT is overwritten")
    again.add_argument("--retry-failed", action="store_true", help="run only the records that have failed")
    parser.add_argument(
        "--continue",
        dest="go_on",
        action="store_true",
        help="go on although the function or the input has changed, or the journal does not know all of OUT",
    )


def run(options: argparse.Namespace) -> int:
    """Run the function over the records."""
    import asyncio
    import logging

    from headgate.cli.batch.job import Job, Wishes

    if options.output == "-" and (options.retry_failed or options.json):
        raise WrongCall("results on stdout are not remembered: --retry-failed and --json need a file as output")
    logging.getLogger("headgate").setLevel(logging.ERROR)  # progress tells how keys are
    job = Job(
        Wishes(
            options.function,
            options.input,
            options.output,
            input_format=options.input_format,
            out_format=options.output_format,
            max_concurrent=options.max_concurrent,
            workers=options.workers,
            keys=options.keys,
            fair=options.fair,
            priority=options.priority,
            id=options.id,
            cost=options.cost,
            reserve=options.reserve,
            retries=options.retries,
            limit=options.limit,
            ordered=not options.unordered,
            restart=options.restart,
            go_on=options.go_on,
            retry_failed=options.retry_failed,
        )
    )
    with asyncio.Runner() as runner:
        ending = runner.run(job.run())
        code = _tell(ending, options)
        if ending.at_once:
            _leave(code)  # and not wait for what runs
    return code


def _tell(ending: Ending, options: argparse.Namespace) -> int:
    """Print how it went; returns the exit code."""
    interrupted = ending.signal is not None and not ending.figures["complete"]
    for line in ending.lines:
        say(line, sys.stderr)
    if options.json:
        print_json(ending.figures)
    again = "" if options.output == "-" else "; the same command goes on"
    if ending.failure is not None:
        complain("headgate map", f"stopped: {_cause(ending.failure)}{_refused(ending, options) or again}")
        return 1
    if interrupted and ending.signal is not None:
        say(f"stopped by {'Ctrl-C' if ending.signal == 2 else 'SIGTERM'}{again}", sys.stderr)
        return 128 + ending.signal
    if ending.figures["failed"] and options.output != "-":
        say(f"failures: {options.output}.failed.jsonl (--retry-failed runs them again)", sys.stderr)
    return 1 if ending.figures["failed"] else 0


def _cause(error: BaseException) -> str:
    from headgate.core.redaction import redact

    return redact(str(error) or type(error).__name__)


def _refused(ending: Ending, options: argparse.Namespace) -> str:
    """Tell what a write that failed has cost, and what to do; "" if none has failed."""
    from headgate.cli.batch.output import WriteFailed

    if not isinstance(ending.failure, WriteFailed):
        return ""
    text = ""
    if lost := ending.figures["unwritten"]:
        text = f". {lost:,} results that were finished could not be written"
    if ending.is_unsynced:
        text += ". The disk did not confirm what was written last: look whether it is healthy"
    if options.output == "-":
        return text
    return f"{text}. {ending.failure.remedy}, and give the same command: it runs only what is not written"


def _leave(code: int) -> None:
    """End the process at once: calls that run are not waited for."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    os._exit(code)
