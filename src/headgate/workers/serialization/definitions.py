"""The functions that a client has defined in a session, each once, and the numbers that name them. Pure."""

from __future__ import annotations

from collections import OrderedDict

from headgate.workers.model import FunctionForm
from headgate.workers.protocol.wire.wire_pb2 import ToWorker


class Definitions:
    """The functions that the worker of a session knows, by number."""

    __slots__ = ("_last", "_numbers", "kept")

    def __init__(self) -> None:
        self.kept: int = 0
        """Bytes of functions by value that the worker keeps."""
        self._numbers: OrderedDict[FunctionForm, int] = OrderedDict()
        self._last = 0

    def number(self, message: ToWorker, form: FunctionForm) -> tuple[int, int]:
        """Return the number of a function, defining it if it is new, and how many bytes that adds to the message."""
        function = self._numbers.get(form)
        if function is not None:
            if form.value:
                self._numbers.move_to_end(form)
            return function, 0
        self._last += 1
        self._numbers[form] = self._last
        self.kept += len(form.value)
        message.definitions.add(
            function=self._last,
            tag=form.tag,
            module=form.module,
            qualname=form.qualname,
            digest=form.digest,
            python=form.python,
            value=form.value,
            fresh=form.fresh,
            thread=form.thread,
            file=form.file,
            generator=form.generator,
            member=form.member,
            reusable=form.reusable,
        )
        return self._last, len(form.value)

    def forget(self, message: ToWorker, most: int) -> None:
        """Let the worker forget those by value that were unused for longest, until it keeps so many bytes at most."""
        for form in [form for form in self._numbers if form.value][:-1]:
            if self.kept <= most:
                return
            message.forgotten.append(self._numbers.pop(form))
            self.kept -= len(form.value)
