"""Keys for `headgate map` and `headgate serve-keys`: from TOML files, environment variables and the output of commands.

    strategy = "primary_backup"               # and other options of ResourcePool
    quota = { requests = 60, per = 60.0 }     # or "learn"
    [keys]
    team-a = "env:OPENAI_KEY_1"
    team-b = { value = "command:pass show openai/b", max_in_flight = 4, tags = ["gpt"] }

No message shows a value, nor what a command printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headgate.cli.output import WrongCall
from headgate.cli.secret_files import Command, Environment, Resolver, check_known, read_table, run_command
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from headgate.resources.pool import ResourcePool

ATTEMPTS = 20
"""How many verdicts about keys a record may get before it fails. A batch must outlast many rate limits."""

_SETTINGS = ("strategy", "cooldown_table", "max_attempts", "probe_on_recovery", "cancel_siblings", "quota")
_FIELDS = ("value", "max_in_flight", "tags", "weight", "quota", "quota_group")


@dataclass(slots=True)
class Keys:
    """The keys of a run, and the options of the pool that they go into. Its repr shows no values."""

    fields: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    """By id: the arguments of Resource."""
    settings: dict[str, Any] = field(default_factory=dict)

    def pool(self, max_attempts: int = ATTEMPTS) -> ResourcePool[Any]:
        """Make the pool; `max_attempts` holds unless the file says otherwise."""
        from headgate.resources.model import Resource
        from headgate.resources.pool import ResourcePool

        resources = [Resource(name, **fields) for name, fields in self.fields.items()]
        options: dict[str, Any] = {"max_attempts": max_attempts, **self.options}
        return ResourcePool(resources, name="keys", **options)

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
    keys.settings |= _with_quota(settings, str(path))
    for name, value in table.items():
        fields = dict(value) if isinstance(value, dict) else {"value": value}
        for known in fields:
            check_known(known, _FIELDS, f"field of the key {name} in {path}")
        if not isinstance(fields.get("value"), (str, dict, list)) or not fields["value"]:
            raise WrongCall(f'the key {name} in {path} has no value: write {name} = "env:NAME" or {{ value = ... }}')
        fields = _with_quota(fields, f"{path}, key {name}")
        _add(keys, name, {**fields, "value": resolve.everywhere(fields["value"])})


def _with_quota(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the fields with a Quota in place of its description: "learn", or { requests = 60, per = 60.0 }."""
    from headgate.resources.quota import Quota, checked_quota

    if "quota" not in fields:
        return fields
    given = fields["quota"]
    try:
        quota = Quota(**given) if isinstance(given, dict) else checked_quota(given)
    except (HeadgateError, TypeError) as error:
        form = 'write quota = "learn" or { requests = 60, per = 60.0, tokens = 90000 }'
        raise WrongCall(f"{where}: {error}: {form}") from error
    return {**fields, "quota": quota}


def _add(keys: Keys, name: str, fields: dict[str, Any]) -> None:
    if name in keys.fields:
        raise WrongCall(f"two keys have the name {name!r}")
    keys.fields[name] = fields
