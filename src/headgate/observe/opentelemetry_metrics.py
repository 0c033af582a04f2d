"""Metrics for OpenTelemetry: what Prometheus is given, under the same names. Needs the extra `otel`.

    from headgate.observe import opentelemetry_metrics
    stop = opentelemetry_metrics.install()          # into the global MeterProvider

OpenTelemetry has no histogram that is read when it is asked for, so the two histograms of waits and runs are not there;
spans tell the same. A metric has an instrument from the first look on in which it has a figure, and what a reader
collects is what the sampler saw last, at most about a second before.

Tokens that calls report are recorded in `gen_ai.client.token.usage` too, the histogram of the conventions for
generative AI. Its attributes of models are those labels of a task that the conventions name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from headgate.core.labels import Labels
from headgate.core.redaction import redact
from headgate.core.topics import subscribe
from headgate.errors import HeadgateError
from headgate.observe import sampler as sampling
from headgate.observe.metrics import families_of

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

    from headgate.observe.metrics import Family
    from headgate.resources.events import TokensUsed

USAGE: Final = "gen_ai.client.token.usage"
_FROM_LABELS: Final = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model")
"""Labels of a task that become attributes of `USAGE`. Others, such as ids of conversations, are without number."""
_UNITS: Final = {"_seconds": "s", "_bytes": "By", "_tokens": "{token}"}


def install(meter_provider: MeterProvider | None = None) -> Callable[[], None]:
    """Give this provider, or the global one, the metrics of all pools of this process, until what it returns is called.

    Instruments cannot be taken back: those of a provider to which nothing is given any more have no figures.
    """
    try:
        import opentelemetry.metrics  # noqa: F401 - the only question is whether it is there
    except ImportError as error:
        raise HeadgateError(
            "metrics need opentelemetry-api, which is not installed", remedy="pip install 'headgate[otel]'"
        ) from error
    return _Instruments(meter_provider).stop


class _Instruments:
    """Gives the instruments of one provider what was seen last."""

    def __init__(self, provider: MeterProvider | None) -> None:
        from opentelemetry import metrics

        self._observation = metrics.Observation
        self._meter = metrics.get_meter("headgate", meter_provider=provider)
        self._families: Mapping[str, Family] = {}
        self._known: set[str] = set()
        self._labels = {name: Labels() for name in _FROM_LABELS}
        self._usage = self._meter.create_histogram(USAGE, "{token}", "Tokens that calls have reported.")
        self._sampler: sampling.Sampler | None = sampling.acquire()
        # Not the other way round, a look for each collection: one makes instruments, with a lock that the other holds.
        self._stops = [self._sampler.listen(self._seen), subscribe(self._used, "resources.tokens")]

    def stop(self) -> None:
        """Give no more figures."""
        sampler, self._sampler, self._families = self._sampler, None, {}
        if sampler is not None:
            for stop in self._stops:
                stop()
            sampling.release(sampler)

    def _seen(self, _: object) -> None:
        """Keep the figures of a look, and make instruments for those metrics that have none yet."""
        if self._sampler is None:
            return
        self._families = {one.name: one for one in families_of(self._sampler) if one.kind != "histogram"}
        for family in self._families.values():
            if family.name not in self._known:
                self._known.add(family.name)
                meter = self._meter
                make = meter.create_observable_gauge if family.kind == "gauge" else meter.create_observable_counter
                unit = next((unit for end, unit in _UNITS.items() if family.name.endswith(end)), "")
                make(family.name, [partial(self._observed, family.name)], unit, family.about)

    def _observed(self, name: str, _: CallbackOptions) -> Iterator[Observation]:
        family = self._families.get(name)
        if family is not None:
            for values, figure in family.figures:
                yield self._observation(figure, dict(zip(family.labels, values, strict=True)))

    def _used(self, event: TokensUsed) -> None:
        """Record a report of tokens. The convention knows input and output: what is neither is not in it."""
        found = {name: event.labels[name] for name in _FROM_LABELS if name in event.labels}
        about = {name: self._labels[name].of(redact(str(value))) for name, value in found.items()}
        for kind, number in (("input", event.input), ("output", event.output)):
            if number:
                self._usage.record(number, {**about, "gen_ai.token.type": kind})


__all__ = ["USAGE", "install"]
