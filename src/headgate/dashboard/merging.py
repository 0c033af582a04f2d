"""Joins the metrics of several programs: each series gets a label that says of which program it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any


def merged(texts: Mapping[str, str | None]) -> bytes:
    """Return one exposition of several, by the process ids of their programs; None: that program did not answer.

    One alone stays as it is. Otherwise `headgate_program_up` says which have answered.
    """
    answered = {program: text for program, text in texts.items() if text is not None}
    if len(answered) == len(texts) == 1:
        return next(iter(answered.values())).encode()
    from headgate.observe.prometheus import exposition

    return exposition(_Joined(answered, set(texts) - set(answered)))


class _Joined:
    def __init__(self, texts: Mapping[str, str], silent: Collection[str]) -> None:
        self._texts = texts
        self._silent = silent

    def describe(self) -> tuple[()]:
        return ()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import Metric
        from prometheus_client.parser import text_string_to_metric_families

        families: dict[str, Metric] = {}
        for program, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                joined = families.get(family.name)
                if joined is None:
                    joined = families[family.name] = Metric(family.name, family.documentation, family.type)
                for sample in family.samples:
                    joined.add_sample(sample.name, {**sample.labels, "program": program}, sample.value)
        up = Metric("headgate_program_up", "1: the program has answered in time", "gauge")
        for program in (*self._texts, *sorted(self._silent)):
            up.add_sample(up.name, {"program": program}, float(program not in self._silent))
        yield from (*families.values(), up)
