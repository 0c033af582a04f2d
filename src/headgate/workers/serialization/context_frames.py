"""Context variables that are sent with calls and results, at the caller and at the worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headgate.context.chains import CHAIN, NONE, VALUES, present
from headgate.context.travel import Exchange, outgoing, received, refused, warn, warn_and_go_on
from headgate.core.imports import Require
from headgate.core.redaction import log_exception
from headgate.errors import InvalidArgument
from headgate.workers.serialization.dynamic_classes import loads
from headgate.workers.serialization.pickling import dump_whole

if TYPE_CHECKING:
    from headgate.workers.protocol.messages import Answer, Outgoing
    from headgate.workers.server.running_call import RunningCall


def nothing() -> bool:
    """Tell whether nothing is set in this Context and nothing was ever asked of it, as is usual."""
    return VALUES.get() is NONE and CHAIN.get() is None


# -- at the caller ----------------------------------------------------------------------------------------------------


def sent(
    tag: str, most: int, exchange: Exchange | None = None, *, lenient: bool = False, limit: str = "max_payload"
) -> bytes:
    """Encode the Context for a call, or for a step of one that has an exchange; errors name what cannot be pickled, or
    the `limit` whose value is `most`.

    To be called after all else of the call is pickled: a token in it gives this Context an id, which is sent here.
    """
    data = outgoing(dump_whole) if exchange is None else exchange.send(dump_whole, lenient=lenient)
    if 0 < most < len(data) and not lenient:
        raise InvalidArgument(
            f"the context variables set when {tag} is called take {len(data):,} bytes, and {limit} is {most:,}",
            remedy="Set less, pass it as an argument in parts, or "
            + (
                "open the pool with a higher `max_payload`."
                if limit == "max_payload"
                else "give the worker ChannelOptions with a higher `max_receive_message_length`."
            ),
        )
    return data


def came_back(call: Outgoing, answer: Answer, running: RunningCall | None, *, skipped: bool = False) -> list[str]:
    """Set what came with an answer; returns what could not be read, for `tell`. `skipped`: nobody takes the answer."""
    if not answer.context:
        return []
    scope = None if running is None else running.scope
    exchange = call.exchange
    if exchange is None:
        return received(answer.context, lambda data: loads(data, scope))
    failures: list[str] = exchange.receive(answer.context, lambda data: loads(data, scope), skipped=skipped)
    return failures


def came_back_late(call: Outgoing, answers: Sequence[Answer], running: RunningCall | None) -> None:
    """Set what came with the answers of a cancelled call; warn of what cannot be read."""
    for answer in answers:
        warn_and_go_on(came_back(call, answer, running), call.form.tag)


def tell(tag: str, failures: Sequence[str], error: BaseException | None = None) -> None:
    """Warn of context variables that could not be read, and note it on the exception that came with them.

    Where a filter makes the warning an error, it is raised from that exception.
    """
    if error is not None:
        notes: list[str] = list(getattr(error, "__notes__", ()))
        try:
            BaseException.__setattr__(error, "__notes__", [*notes[:-1], *failures, *notes[-1:]])
        except BaseException:  # its class does not like to be changed
            pass
    try:
        warn(failures, tag)
    except Warning as strict:
        raise strict from error


# -- at the worker ----------------------------------------------------------------------------------------------------


def receive(running: RunningCall, data: bytes, require: Require | None = None) -> None:
    """Set in this Context what came with a call or with a step. ImportNeeded of `require`: nothing was set."""
    if running.exchange is None:
        running.exchange = Exchange("worker")
    failures = running.exchange.receive(data, lambda value: loads(value, running.scope, require))
    if failures:
        warn(failures, running.begun.function.tag)


def changed(running: RunningCall) -> bytes:
    """Encode the changes of this Context for a result or an item. Never fails: the outcome must be sent."""
    exchange = running.exchange
    if exchange is None:
        if nothing():
            return b""
        exchange = running.exchange = Exchange("worker")
    tag, (limit, name) = running.begun.function.tag, running.stream.max_context
    try:
        data = exchange.send(dump_whole, lenient=True, tag=tag, most=limit, limit=name)
    except BaseException as error:
        log_exception("headgate.workers", "what %s set in its Context cannot be told to its caller", tag)
        data = refused(f"what {tag} set in its Context cannot be written down ({type(error).__name__})")
    return data


def ended(running: RunningCall) -> bytes:
    """Encode the last changes of this Context: nothing will run in it any more."""
    data = changed(running)
    chain = present()
    if chain is not None:
        chain.end()
    return data
