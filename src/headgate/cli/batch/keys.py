"""Keys for `headgate map` and `headgate serve-keys`: from TOML files, environment variables and the output of commands.

    strategy = "primary_backup"               # and other options of ResourcePool
    quota = { requests = 60, per = 60.0 }     # or "learn"
    classify = "jobs:classify"                # or "http_errors", which is the default, or "none"
    [keys]
    team-a = "env:OPENAI_KEY_1"
    team-b = { value = "command:pass show openai/b", max_in_flight = 4, tags = ["gpt"] }
    team-c = { value = "env:OPENAI_KEY_3", max_in_flight = "adaptive" }     # or { start = 4, most = 50, ... }

No message shows a value, nor what a command printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headgate.cli.output import WrongCall
from headgate.cli.secret_files import Command, Environment, Resolver, check_known, read_table, run_command
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from headgate.resources.pool import ResourcePool

ATTEMPTS = 20
"""How many keys may be found unusable with one record before it fails. Rate limits are not counted."""
ERRORS = 3
"""How many attempts of a record may end in an error that is not the key's: 5xx, a broken connection."""

_SETTINGS = (
    *("strategy", "cooldown_table", "max_attempts", "probe_on_recovery", "cancel_siblings"),
    *("max_in_flight", "quota", "classify"),
)
_CLASSIFIERS = ("http_errors", "none")
_FIELDS = ("value", "max_in_flight", "tags", "weight", "quota", "quota_group")


@dataclass(slots=True)
class Keys:
    """The keys of a run, and the options of the pool that they go into. Its repr shows no values."""

    fields: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    """By id: the arguments of Resource."""
    settings: dict[str, Any] = field(default_factory=dict)
    classify: str | None = None
    """What tells which errors are the key's: "http_errors", "none", or module:function; None: the file does not say."""

    def pool(self, max_attempts: int = ATTEMPTS, max_errors: int | None = None) -> ResourcePool[Any]:
        """Make the pool; `max_attempts` and `max_errors` hold unless the file says otherwise."""
        from headgate.resources.engine import engine_of
        from headgate.resources.model import Resource
        from headgate.resources.pool import ResourcePool

        resources = [Resource(name, **fields) for name, fields in self.fields.items()]
        options: dict[str, Any] = {"max_attempts": max_attempts, **self.options}
        pool: ResourcePool[Any] = ResourcePool(resources, name="keys", **options)
        if "max_attempts" not in self.settings:
            engine = engine_of(pool)
            engine.plan = replace(engine.plan, max_errors=max_errors)
        return pool

    @property
    def most_in_flight(self) -> int | None:
        """How many calls at a time all keys together take at most; None: one of them has no limit."""
        from headgate.gate.adaptive import Adaptive

        limits = [fields.get("max_in_flight", self.settings.get("max_in_flight")) for fields in self.fields.values()]
        if None in limits:
            return None
        return sum(limit.most if isinstance(limit, Adaptive) else limit for limit in limits if limit is not None)

    def load_classifier(self) -> None:
        """Import what `classify` names, and let pools have it. Raises WrongCall."""
        self.settings["classify"] = _classifier(self.classify)

    @property
    def have_tokens(self) -> bool:
        """Whether a key has a limit of tokens, or may learn one: `--reserve` has no effect on others."""
        from headgate.resources.costs import REQUESTS
        from headgate.resources.quota import LEARN

        quotas = [fields.get("quota", self.settings.get("quota")) for fields in self.fields.values()]
        return any(
            quota == LEARN or any(dimension != REQUESTS for one in quota for dimension in one.limits)
            for quota in quotas
            if quota is not None
        )

    @property
    def options(self) -> dict[str, Any]:
        """The options of the pool. A call that was accepted is paid for, so others that find its key limited do not
        interrupt it."""
        return {"cancel_siblings": False, **self.settings}


def read_keys(given: Sequence[str], environment: Environment, command: Command | None = None) -> Keys:
    """Collect the keys that the command line names: files, `env:NAME`, `command:...` (a key for each line)."""
    keys = Keys()
    resolve = Resolver(environment, command or run_command)
    for place in given:
        if place.startswith("env:"):
            _add(keys, place.removeprefix("env:"), {"value": resolve(place)})
        elif place.startswith("command:"):
            printed = [line.strip() for line in resolve(place).splitlines() if line.strip()]
            for number, value in enumerate(printed, 1):
                _add(keys, f"key-{number}", {"value": value})
        else:
            _read_file(keys, Path(place), resolve)
    return keys


def _read_file(keys: Keys, path: Path, resolve: Resolver) -> None:
    table, settings = read_table(path, "keys", "value", 'team-a = "env:OPENAI_KEY_1"')
    for name in settings:
        check_known(name, _SETTINGS, f"option in {path}")
    given = settings.pop("classify", None)
    if given is not None and not (isinstance(given, str) and (given in _CLASSIFIERS or ":" in given)):
        raise WrongCall(f'{path}: classify must be "http_errors", "none" or "module:function", got {given!r}')
    keys.classify = given or keys.classify
    keys.settings |= _with_limits(settings, str(path))
    for name, value in table.items():
        fields = dict(value) if isinstance(value, dict) else {"value": value}
        for known in fields:
            check_known(known, _FIELDS, f"field of the key {name} in {path}")
        if not isinstance(fields.get("value"), (str, dict, list)) or not fields["value"]:
            raise WrongCall(f'the key {name} in {path} has no value: write {name} = "env:NAME" or {{ value = ... }}')
        fields = _with_limits(fields, f"{path}, key {name}")
        _add(keys, name, {**fields, "value": resolve.everywhere(fields["value"])})


def _with_limits(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the fields with a Quota and an Adaptive in place of their descriptions."""
    return _with_adaptive(_with_quota(fields, where), where)


def _with_adaptive(fields: dict[str, Any], where: str) -> dict[str, Any]:
    from headgate.gate.adaptive import Adaptive, checked_max_in_flight

    if "max_in_flight" not in fields:
        return fields
    given = fields["max_in_flight"]
    try:
        limit = Adaptive(**given) if isinstance(given, dict) else checked_max_in_flight(given)
    except (HeadgateError, TypeError) as error:
        form = 'write max_in_flight = 4, "adaptive", or { start = 4, least = 1, most = 200, pause = 5.0 }'
        raise WrongCall(f"{where}: {error}: {form}") from error
    return {**fields, "max_in_flight": limit}


def _with_quota(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the fields with checked quotas in place of their description.

    That is "learn", { requests = 60, per = 60.0 }, or a list of such tables.
    """
    from headgate.resources.quota import Quota, checked_quota

    if "quota" not in fields:
        return fields
    given = fields["quota"]
    try:
        tables = given if isinstance(given, list) else [given]
        made = [Quota(**one) if isinstance(one, dict) else one for one in tables]
        quota = checked_quota(made if isinstance(given, list) else made[0])
    except (HeadgateError, TypeError) as error:
        form = 'write quota = "learn", { requests = 60, per = 60.0, tokens = 90000 } or a list of such tables'
        raise WrongCall(f"{where}: {error}: {form}") from error
    return {**fields, "quota": quota}


def _classifier(name: str | None) -> Callable[[Any], Any] | None:
    if name == "none":
        return None
    if name is None or name == "http_errors":
        from headgate.resources.http_errors import http_errors

        return http_errors
    from headgate.cli.batch.functions import find_function
    from headgate.core.checks import checked_classifier

    return checked_classifier(find_function(name, 1, "an error or a result (classify, in the file of keys)").call)


def _add(keys: Keys, name: str, fields: dict[str, Any]) -> None:
    if name in keys.fields:
        raise WrongCall(f"two keys have the name {name!r}")
    keys.fields[name] = fields
