"""Arguments and results of the scripts on records.

Pure functions. The scripts are in store/scripts. A result is a Redis value, or the StoreError that
the client returns in its place.
"""

from typing import Any, Final

from store import layout, record_fields
from store.answers import (
    ClaimAnswer,
    Claiming,
    ClaimState,
    Publication,
    Publishing,
    Releasing,
    Withdrawing,
)
from store.client import Call, fields_of
from store.errors import StoreCorrupt, StoreError, StoreFull, StoreUnavailable
from store.record import LOCATIONS_MAX

HOLDER_BYTES_MAX: Final = 256
"""Of a claim's holder: a node's id and boot, and a time. Who can write the store may write more."""


def publish_call(publishing: Publishing) -> Call:
    record, location = publishing.record, publishing.location
    item = (record.namespace, record.key)
    return (
        (layout.record(*item), layout.claim(*item), layout.gone(*item)),
        (
            f"at:{location.node}",
            location.text,
            milliseconds_of(publishing.ttl_seconds),
            publishing.claim_token or "",
            LOCATIONS_MAX,
            f"{record.created:.3f}",
            "sole" if publishing.sole else "",
            publishing.device.text if publishing.device else "",
            record.device,
            *record_fields.identity_fields(record),
        ),
    )


def withdraw_call(withdrawing: Withdrawing) -> Call:
    item, exactly = (withdrawing.namespace, withdrawing.key), withdrawing.exactly
    expected = exactly.text if exactly else ""
    if exactly and exactly.node != withdrawing.node:
        expected = "another node's"  # equal to no location
    return (
        (layout.record(*item), layout.gone(*item)),
        (
            layout.key_field(withdrawing.key),
            f"at:{withdrawing.node}",
            expected,
            f"{withdrawing.reason}:{withdrawing.node}",
            withdrawing.gone_seconds,
            int(withdrawing.may_have_ended),
        ),
    )


def claim_call(claiming: Claiming) -> Call:
    item = (claiming.namespace, claiming.key)
    lease = milliseconds_of(claiming.lease_seconds)
    return (
        (layout.claim(*item), layout.record(*item)),
        (claiming.holder, claiming.token, claiming.state.value, lease),
    )


def release_call(releasing: Releasing) -> Call:
    return ((layout.claim(releasing.namespace, releasing.key),), (releasing.token,))


def claim_answer(claiming: Claiming, answer: Any) -> ClaimAnswer:
    granted, holder, state, milliseconds, fields = answer
    return ClaimAnswer(
        granted=granted == 1,
        holder=holder[:HOLDER_BYTES_MAX].decode("utf-8", "replace"),
        state=ClaimState(state.decode()),
        remaining_seconds=milliseconds / 1000,
        record=record_fields.read_record(claiming.namespace, claiming.key, fields_of(fields)),
    )


def publication(answer: Any) -> Publication:
    """The result of one publication among many."""
    if isinstance(answer, StoreFull):
        return Publication.REFUSED
    if isinstance(answer, StoreUnavailable):
        return Publication.UNREACHED
    if isinstance(answer, StoreCorrupt) and answer.wrong_type:
        return Publication.CONFLICT  # a foreign value under the record's name
    if isinstance(answer, StoreError):
        raise answer
    return Publication(answer.decode())


def removed(answer: Any) -> bool | None:
    """The result of one withdrawal or release among many; None if its server was not reached."""
    if isinstance(answer, StoreUnavailable):
        return None
    if isinstance(answer, StoreCorrupt) and answer.wrong_type:
        return False
    if isinstance(answer, StoreError):
        raise answer
    return bool(answer == 1)


def milliseconds_of(seconds: float) -> int:
    return max(1, round(seconds * 1000))
