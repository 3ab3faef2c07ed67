"""What every MetadataStore must keep for people: why a key is gone, or could not be fetched.

See contract_store.
"""

from contract_store import a_location, a_record
from contract_store_claims import ENCODING, INTENT
from store import ClaimState, Failure, MetadataStore, Withdrawing


class ReasonContract:
    """Subclasses provide a `store` fixture that is empty at the start of each test."""

    def test_reasons_of_records_that_expired_or_were_evicted(
        self, store: MetadataStore, namespace: str
    ) -> None:
        ended = Withdrawing(namespace, "k", "node-1", "expired", may_have_ended=True)
        assert store.withdraw_many([ended]) == [False]
        assert store.gone(namespace, "k") == "expired"
        later = Withdrawing(namespace, "k", "node-2", "evicted", may_have_ended=True)
        assert store.withdraw_many([later]) == [False]
        assert store.gone(namespace, "k") == "expired", "the first reason stands"
        store.publish(a_record(namespace, "k"), a_location("node-2"))
        assert store.gone(namespace, "k") is None
        assert store.withdraw_many([ended]) == [False]
        assert store.gone(namespace, "k") is None, "node-2 has it"
        assert store.withdraw_many([later]) == [True]
        assert store.gone(namespace, "k") == "evicted"

    def test_the_last_failure_of_a_key(self, store: MetadataStore, namespace: str) -> None:
        first = Failure(namespace, "k", "checksum", "node-1", "node-2")
        second = Failure(namespace, "k", "peer_failed", "node-3", "node-2")
        other = Failure(namespace, "another key", "checksum", "node-1", "node-2")
        store.note_failures([first, other])
        assert store.failure(namespace, "k") == first
        store.note_failures([second])
        assert store.failure(namespace, "k") == second
        assert store.failure(namespace, "another key") == other
        assert store.failure("other", "k") is None

    def test_a_claim_has_its_start(self, store: MetadataStore, namespace: str) -> None:
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

    def test_the_reason_of_an_invalidated_namespace(
        self, store: MetadataStore, namespace: str
    ) -> None:
        keys = [f"k{n}" for n in range(30)] + ["a key with spaces " + "x" * 200]
        for key in keys:
            for node in ("node-1", "node-2"):
                store.publish(a_record(namespace, key), a_location(node))
        store.publish(a_record("other", "k0"), a_location())
        before = store.invalidations()
        store.mark_invalid(namespace, 17.5)
        assert store.invalidations() == before | {namespace: 17.5}
        store.mark_invalid(namespace, 18.25)
        assert store.invalidations()[namespace] == 18.25
        assert store.clear(namespace) == len(keys)
        assert store.clear(namespace) == 0
        assert store.locate(namespace, keys) == [None] * len(keys)
        assert {store.gone(namespace, key) for key in keys} == {"invalidated"}
        assert store.locate("other", ["k0"]) != [None]
        store.publish(a_record(namespace, "k0"), a_location())
        assert store.gone(namespace, "k0") is None
