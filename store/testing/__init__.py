"""The contract of a store as tests, for every implementation: ours and those of other packages.

A test class inherits `CoreContract`, and `BrowsingContract` too if its store is a BrowsableStore.
It provides the store: see `docs/stores.md` for an example. Only tests import this package; it needs
pytest.
"""

from store.testing.browsing import BrowsingContract
from store.testing.claims import ClaimContract
from store.testing.devices import DeviceContract
from store.testing.nodes import NodeContract
from store.testing.records import RecordContract
from store.testing.sole import SoleContract

__all__ = ["BrowsingContract", "CoreContract"]


class CoreContract(RecordContract, ClaimContract, NodeContract, SoleContract, DeviceContract):
    """What every MetadataStore must do."""
