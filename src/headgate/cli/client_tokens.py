"""The tokens of `headgate serve-keys`: who may use the proxy, and for which tenant.

    [tokens]
    ann = "env:ANN_TOKEN"                                       # the tenant is ann
    ci = { token = "command:pass show ci", tenant = "build" }
    gateway = { token = "env:GATEWAY_TOKEN", names_tenant = true }   # may name tenants in X-Headgate-Tenant

No message shows a token.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headgate.cli.output import WrongCall
from headgate.cli.secret_files import Command, Environment, Resolver, check_known, read_table, run_command

if TYPE_CHECKING:
    from headgate.integrations.keys_proxy.tokens import Client

_FIELDS = ("token", "tenant", "names_tenant")
_EXAMPLE = 'ann = "env:ANN_TOKEN"'


def read_tokens(path: Path, environment: Environment, command: Command | None = None) -> dict[str, Client]:
    """Return the clients that a file names, by token."""
    table, rest = read_table(path, "tokens", "token", _EXAMPLE)
    for name in rest:
        check_known(name, ("tokens",), f"table in {path}")
    resolve = Resolver(environment, command or run_command)
    clients: dict[str, Client] = {}
    for name, value in table.items():
        fields = dict(value) if isinstance(value, dict) else {"token": value}
        for known in fields:
            check_known(known, _FIELDS, f"field of the token {name} in {path}")
        token, client = _client(name, fields, resolve, path)
        if token in clients:
            raise WrongCall(f"the token {name} in {path} is that of another client: give each one its own")
        clients[token] = client
    return clients


def _client(name: str, fields: dict[str, Any], resolve: Resolver, path: Path) -> tuple[str, Client]:
    from headgate.integrations.keys_proxy.tokens import SHORTEST, Client

    token, tenant, names = fields.get("token"), fields.get("tenant", name), fields.get("names_tenant", False)
    if not isinstance(token, str) or not token:
        raise WrongCall(f'the token {name} in {path} has no value: write {name} = "env:NAME" or {{ token = ... }}')
    if not isinstance(tenant, str) or not tenant.strip() or not isinstance(names, bool):
        raise WrongCall(f"of the token {name} in {path}, tenant must be a name, and names_tenant true or false")
    value = resolve(token)
    if len(value) < SHORTEST:
        raise WrongCall(
            f"the token {name} has less than {SHORTEST} characters, and could be guessed: make a longer one"
        )
    return value, Client(tenant, names)
