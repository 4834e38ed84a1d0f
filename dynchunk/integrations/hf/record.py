"""Policies in the config of a model, where ``save_pretrained`` finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynchunk._checks import require
from dynchunk.attention.policy import Policy

#: Of the entry in a config.
KEY = "dynchunk"

#: Version of what :func:`write` returns.
VERSION = 1


def write(policies: Sequence[Policy | None]) -> dict[str, Any]:
    """Return what a config can hold: each distinct policy once.

    >>> from dynchunk.attention import full
    >>> found = write([None, full(), full()])
    >>> found["layers"], read(found)[1] == full()
    ([None, 0, 0], True)
    """
    distinct = list(dict.fromkeys(policy for policy in policies if policy is not None))
    return {
        "version": VERSION,
        "policies": [policy.as_dict() for policy in distinct],
        "layers": [None if policy is None else distinct.index(policy) for policy in policies],
    }


def read(found: dict[str, Any]) -> list[Policy | None]:
    """Return the policies that :func:`write` was given.

    Raises
    ------
    ValueError
        Of another version, or not what it wrote.
    """
    version = found.get("version")
    require(version == VERSION, "config.dynchunk: version", str(VERSION), version)
    policies = [Policy.from_dict(data) for data in found["policies"]]
    return [None if i is None else policies[i] for i in found["layers"]]
