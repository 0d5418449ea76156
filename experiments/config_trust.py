"""The tables of a config that are about trust: who is believed, and what peers keep to themselves."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from ..gossip.privacy import ReleasePlan
from ..gossip.trust import GuardSettings
from .config_values import sentence


def _table_of(kind: type) -> BeforeValidator:
    """A table becomes a settings object; its mistakes are one sentence that names the key."""

    def make(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = [field.name for field in fields(kind)]
        if unknown := [key for key in value if key not in known]:
            near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
            raise sentence(f"unknown key {unknown[0]!r}; {hint}")
        try:
            return TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            text = first["msg"].removeprefix("Value error, ")
            place = ".".join(map(str, first["loc"]))
            raise sentence(f"{place}: {text}, not {first['input']!r}" if place else text) from None

    return BeforeValidator(make)


class Trust(BaseModel):
    """Whom live peers believe. `trust = "swarm"` is short for a table with that kind alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["none", "swarm"] = "none"
    """none: whoever reaches the broker can read and forge. swarm: peers have keys and invitations, and
    what they send is sealed; `gossamer swarm` makes throw-away ones for its own peers."""
    guards: Annotated[GuardSettings | Literal["off"] | None, _table_of(GuardSettings)] = None
    """Bounds on what others may send, as in `{distance = 2.0}`: see gossip/trust/guards.py for all keys.
    If left out, the usual ones with trust and none without; "off" for none."""
    private: dict[str, float] = {}
    """Partial models that are averaged behind masks, and the masks' scale, a power of two well above the
    values: `{global = 64.0}`. For kind "swarm" and the lockstep modes."""
    dp: Annotated[ReleasePlan | None, _table_of(ReleasePlan)] = None
    """Differential privacy of what peers train, `{clip = 1.0, noise = 1.0}`: see gossip/privacy.py."""


def named_kind(value: Any) -> Any:
    """Let the kind's name stand for a table."""
    return {"kind": value} if isinstance(value, str) else value


TrustTable = Annotated[Trust, BeforeValidator(named_kind)]
