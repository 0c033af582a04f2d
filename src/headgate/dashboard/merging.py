"""Joins the metrics of several programs: each series gets a label that says of which program it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def merged(texts: Mapping[str, str]) -> bytes:
    """Return one exposition of several, by the process ids of their programs. One alone stays as it is."""
    if len(texts) == 1:
        return next(iter(texts.values())).encode()
    from headgate.observe.prometheus import exposition

    return exposition(_Joined(texts))


class _Joined:
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

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
        yield from families.values()
