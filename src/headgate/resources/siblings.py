"""Which uses of a resource are cancelled because an older one found it limited or gone. Pure."""

from __future__ import annotations

from headgate.core.checks import Affinity
from headgate.resources.effects import Cancel, Effects
from headgate.resources.members import CANCEL_REQUESTED, Use


def younger_siblings(use: Use, affinity: Affinity | None = None) -> Effects:
    """Cancel uses acquired after this one: all, or those of one affinity.

    The older may already have had their effect upstream and are left alone.
    """
    effects: Effects = []
    if not use.member.rotation.cancel_siblings:
        return effects
    resource = use.member.resource
    for other in reversed(use.member.uses.values()):
        if other.order < use.order:
            break
        member = other.member
        inherited = member.resource is not resource  # a use of its predecessor, which only counts against the limit
        unaffected = affinity is not None and other.affinity != affinity
        if inherited or unaffected or other.status != "in_flight" or not member.rotation.cancel_siblings:
            continue
        if other.handle is None or other.handle is CANCEL_REQUESTED:
            other.handle = CANCEL_REQUESTED  # in its first step, on another thread: `set_handle` tells it
            continue
        other.status = "cancelled"
        member.sibling_cancels += 1
        if member.gone:
            member.rotation.totals.absorb(member)
        effects.append(Cancel(other))
    return effects
