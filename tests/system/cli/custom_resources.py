"""The schemas of custom resources that the manifests use: of each only the fields that we write.

They are as in the public definitions (KEDA 2, `keda.sh/v1alpha1`; cert-manager 1, `cert-manager.io/v1`). A field that
is not here is refused.

No package brings these schemas. A new field must be copied from the public definition by hand, with its type.
"""

from __future__ import annotations

from typing import Any


def strict(required: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    """An object with these fields, and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
DURATION: dict[str, Any] = {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(s|m|h))+$"}  # of Go


def listed(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


_REFERENCE = strict(("name",), name=TEXT, kind={"enum": ["Issuer", "ClusterIssuer"]}, group=TEXT)
_PRIVATE_KEY = strict(
    algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
    encoding={"enum": ["PKCS1", "PKCS8"]},
    rotationPolicy={"enum": ["Never", "Always"]},
    size={"type": "integer"},
)
_USAGES = ["signing", "digital signature", "content commitment", "key encipherment", "server auth", "client auth"]

SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("cert-manager.io/v1", "Issuer"): {
        "oneOf": [
            strict(("selfSigned",), selfSigned=strict()),
            strict(("ca",), ca=strict(("secretName",), secretName=TEXT)),
        ]
    },
    ("cert-manager.io/v1", "Certificate"): strict(
        ("issuerRef", "secretName"),
        isCA={"type": "boolean"},
        commonName={"type": "string", "maxLength": 64},
        secretName=TEXT,
        duration=DURATION,
        renewBefore=DURATION,
        privateKey=_PRIVATE_KEY,
        usages=listed({"enum": _USAGES}),
        dnsNames=listed(TEXT),
        issuerRef=_REFERENCE,
    ),
    ("keda.sh/v1alpha1", "TriggerAuthentication"): strict(
        secretTargetRef=listed(strict(("key", "name", "parameter"), key=TEXT, name=TEXT, parameter=TEXT))
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): strict(
        ("scaleTargetRef", "triggers"),
        scaleTargetRef=strict(("name",), name=TEXT, kind=TEXT, apiVersion=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount={"type": "integer", "minimum": 1},
        pollingInterval={"type": "integer", "minimum": 1},
        cooldownPeriod=COUNT,
        triggers=listed(
            strict(
                ("metadata", "type"),
                type={"const": "postgresql"},
                # Every value of the metadata of a trigger is a string.
                metadata=strict(("query", "targetQueryValue"), query=TEXT, targetQueryValue=TEXT),
                authenticationRef=strict(("name",), name=TEXT),
            )
        ),
    ),
}


def schema_of(version: str, kind: str) -> dict[str, Any] | None:
    """The schema of a custom resource; None: we have none."""
    spec = SPECS.get((version, kind))
    if spec is None:
        return None
    fixed = {"apiVersion": {"const": version}, "kind": {"const": kind}}
    return strict(
        ("apiVersion", "kind", "metadata", "spec"),
        **fixed,
        metadata=strict(("name",), name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}),
        spec=spec,
    )
