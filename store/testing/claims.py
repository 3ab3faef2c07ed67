"""What every store must do about claims.

Leases run on the store's clock. Tests that wait use short real leases, and check only that nothing
ends early and that everything ends.
"""

import time

import pytest

from store import (
    LOCATIONS_MAX,
    BlockingStore,
    ClaimAnswer,
    ClaimState,
    Publication,
    Releasing,
)
from store.testing.samples import StoreContract, a_location, a_record

INTENT, ENCODING = ClaimState.INTENT, ClaimState.ENCODING


def ask(
    store: BlockingStore,
    namespace: str,
    who: str,
    lease_seconds: float = 30.0,
    *,
    key: str = "k",
    state: ClaimState = ENCODING,
) -> ClaimAnswer:
    """Claim for the claimant `who`, whose token follows from the name."""
    return store.claim(
        namespace,
        key,
        holder=f"{who}:1",
        token=f"token-of-{who}",
        state=state,
        lease_seconds=lease_seconds,
    )


class ClaimContract(StoreContract):
    def test_one_claim_at_a_time(self, store: BlockingStore, namespace: str) -> None:
        first = ask(store, namespace, "a")
        assert (first.granted, first.holder, first.state) == (True, "a:1", ENCODING)
        second = ask(store, namespace, "b")
        assert (second.granted, second.holder, second.state) == (False, "a:1", ENCODING)
        assert 0 < second.remaining_seconds <= 30
        assert not store.release_claim(namespace, "k", token="token-of-b")
        assert store.release_claim(namespace, "k", token="token-of-a")
        assert not store.release_claim(namespace, "k", token="token-of-a")
        assert ask(store, namespace, "b").granted

    def test_claims_are_released_together(self, store: BlockingStore, namespace: str) -> None:
        ask(store, namespace, "a", key="mine")
        ask(store, namespace, "b", key="theirs")
        ask(store, "other", "a", key="mine")
        items = [(namespace, "mine"), (namespace, "theirs"), (namespace, "none"), ("other", "mine")]
        releasings = [Releasing(*item, "token-of-a") for item in items]
        assert store.release_many(releasings) == [True, False, False, True]
        assert store.release_many([]) == []
        assert ask(store, namespace, "b", key="mine").granted
        assert not ask(store, namespace, "a", key="theirs").granted

    def test_a_claim_ends_with_its_lease_unless_renewed(
        self, store: BlockingStore, namespace: str
    ) -> None:
        for key in ("left", "renewed"):
            ask(store, namespace, "a", 1.5, key=key)
        assert ask(store, namespace, "a", 30, key="renewed").remaining_seconds > 2
        assert not ask(store, namespace, "b", key="left").granted
        time.sleep(1.6)
        assert ask(store, namespace, "b", key="left").granted
        late = ask(store, namespace, "a", key="left")
        assert (late.granted, late.holder) == (False, "b:1")
        assert not ask(store, namespace, "b", key="renewed").granted

    def test_an_intent_becomes_encoding(self, store: BlockingStore, namespace: str) -> None:
        meant = ask(store, namespace, "a", 2, state=INTENT)
        assert (meant.granted, meant.state) == (True, INTENT)
        assert ask(store, namespace, "b").state is INTENT, "others see how far it has come"
        at_work = ask(store, namespace, "a", 30)
        assert (at_work.granted, at_work.state) == (True, ENCODING)
        seen = ask(store, namespace, "b")
        assert (seen.granted, seen.state) == (False, ENCODING)
        assert seen.remaining_seconds > 2

    def test_an_intent_is_not_renewed(self, store: BlockingStore, namespace: str) -> None:
        ask(store, namespace, "a", 1.5, state=INTENT)
        again = ask(store, namespace, "a", 30, state=INTENT)
        assert (again.granted, again.state) == (True, INTENT)
        assert again.remaining_seconds <= 1.5
        time.sleep(1.6)
        assert ask(store, namespace, "b").granted

    def test_an_encoding_claim_stays_one(self, store: BlockingStore, namespace: str) -> None:
        ask(store, namespace, "a", 30)
        again = ask(store, namespace, "a", 1, state=INTENT)
        assert (again.granted, again.state) == (True, ENCODING)
        assert again.remaining_seconds > 2, "to mean it again takes nothing back"
        assert ask(store, namespace, "b").remaining_seconds > 2

    def test_an_intent_after_its_end_is_a_new_one(
        self, store: BlockingStore, namespace: str
    ) -> None:
        ask(store, namespace, "a", 0.1)
        time.sleep(0.15)
        again = ask(store, namespace, "a", 5, state=INTENT)
        assert (again.granted, again.state) == (True, INTENT)

    def test_the_reply_to_a_claim_has_the_record(
        self, store: BlockingStore, namespace: str
    ) -> None:
        assert ask(store, namespace, "a").record is None
        assert ask(store, namespace, "b").record is None
        store.publish(a_record(namespace, "k"), a_location(checksum=7), claim_token="token-of-a")
        late = ask(store, namespace, "b")
        assert late.granted
        assert [late.record] == store.locate(namespace, ["k"])
        assert late.record is not None
        refused = ask(store, namespace, "c")
        assert (refused.granted, refused.record) == (False, late.record)
        again = ask(store, namespace, "b", state=INTENT)
        assert (again.granted, again.record) == (True, late.record)
        assert ask(store, namespace, "c", key="other").record is None

    @pytest.mark.parametrize("key", ["x" * 5000, "}{", "Ω*?[a-z]", "\udcff not decodable"])
    def test_the_record_of_an_odd_key(self, store: BlockingStore, namespace: str, key: str) -> None:
        store.publish(a_record(namespace, key), a_location())
        found = ask(store, namespace, "a", key=key).record
        assert found is not None
        assert found.key == key

    def test_a_publication_ends_only_the_publishers_claim(
        self, store: BlockingStore, namespace: str
    ) -> None:
        record = a_record(namespace, "k")
        ask(store, namespace, "a")
        store.publish(record, a_location("node-2"), claim_token="token-of-b")
        assert not ask(store, namespace, "b").granted
        store.publish(record, a_location("node-3"))
        assert not ask(store, namespace, "b").granted
        store.publish(record, a_location(), claim_token="token-of-a")
        assert ask(store, namespace, "b").granted

    def test_publishing_a_present_copy_ends_the_claim_too(
        self, store: BlockingStore, namespace: str
    ) -> None:
        for state in (INTENT, ENCODING):
            store.publish(a_record(namespace, "k"), a_location())
            ask(store, namespace, "a", state=state)
            again = store.publish(a_record(namespace, "k"), a_location(), claim_token="token-of-a")
            assert again is Publication.PRESENT
            assert not store.release_claim(namespace, "k", token="token-of-a")

    def test_a_publication_to_a_full_record_ends_the_claim_too(
        self, store: BlockingStore, namespace: str
    ) -> None:
        for n in range(LOCATIONS_MAX):
            store.publish(a_record(namespace, "k"), a_location(f"node-{n}"))
        ask(store, namespace, "a")
        full = store.publish(
            a_record(namespace, "k"), a_location("one-more"), claim_token="token-of-a"
        )
        assert full is Publication.FULL
        assert not store.release_claim(namespace, "k", token="token-of-a")

    def test_a_conflict_does_not_end_the_claim(self, store: BlockingStore, namespace: str) -> None:
        store.publish(a_record(namespace, "k"), a_location())
        ask(store, namespace, "a")
        other = a_record(namespace, "k", dtype="float32")
        answer = store.publish(other, a_location("node-2"), claim_token="token-of-a")
        assert answer is Publication.CONFLICT
        assert store.release_claim(namespace, "k", token="token-of-a")

    def test_a_token_with_a_colon_is_refused(self, store: BlockingStore, namespace: str) -> None:
        with pytest.raises(ValueError):
            store.claim(namespace, "k", holder="a", token="x:y", state=ENCODING, lease_seconds=1)

    def test_a_claim_has_its_start(self, store: BlockingStore, namespace: str) -> None:
        def ask(state: ClaimState, holder: str, token: str = "t") -> str:
            return store.claim(
                namespace, "k", holder=holder, token=token, state=state, lease_seconds=30.0
            ).holder

        assert ask(INTENT, "a:1") == "a:1"
        assert ask(INTENT, "a:2") == "a:1"
        assert ask(ENCODING, "a:3") == "a:3", "another state since then"
        assert ask(ENCODING, "a:4") == "a:3"
        assert ask(INTENT, "a:5") == "a:3"
        assert ask(ENCODING, "b:6", token="other") == "a:3"
        assert store.release_claim(namespace, "k", token="t")
        assert ask(ENCODING, "b:7", token="other") == "b:7"
