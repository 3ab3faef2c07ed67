"""A worker's side of the device lane: a pool on its device that holds the outputs it encodes.

Off by default (`device_lane`). `EcWorker` makes and closes it at start and end, and uses it on the
thread of its save queue. It is imported only where the setting is on, because it imports torch's
distributed package.
"""

from contextlib import contextmanager
from typing import TYPE_CHECKING

from connectors.settings import ConnectorSettings
from lookup_buffer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from lookup_buffer.client.buffer import LookupBuffer


class WorkerDeviceLane:
    """See `DeviceLane`. A worker that never loads opens no pairs, and one that never stores offers
    nothing.

    Raises:
        ConfigError: this device does not support that lane.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        device: str,
        *,
        loads: bool = True,
        stores: bool = True,
    ) -> None:
        from lookup_buffer.device.lane import DeviceLane

        self._lane: DeviceLane = DeviceLane(
            settings.device_lane,
            device=device,
            pool_bytes=settings.device_pool_bytes,
            receives=loads,
            offers=stores,
            host=settings.lane_host,
            token=settings.read_token(),
        )

    def join(self, buffer: "LookupBuffer") -> None:
        buffer.join_lane(self._lane)

    @contextmanager
    def pool_output(
        self, namespace: str, key: str, tensor: "torch.Tensor"
    ) -> "Iterator[Callable[[int], None]]":
        """Hold an immutable output in the pool during its insert.

        Yields a function for the checksum of the stored bytes. If it was called, the output is
        offered to other devices; otherwise it leaves the pool.
        """
        stored: list[int] = []
        entry = self._lane.prepare(namespace, key, tensor, immutable=True)
        try:
            yield stored.append
        finally:
            self._lane.settle(entry, stored[0] if stored else None)

    def close(self) -> None:
        self._lane.close()


def validate_device_lane(settings: ConnectorSettings, ranks: int) -> None:
    """Refuse a configuration that can hang the engine.

    Raises:
        ConfigError: the lane is on together with tensor parallelism.
    """
    if settings.device_lane == "off" or ranks == 1 or settings.device_lane_forced:
        return
    raise ConfigError(
        f"setting 'device_lane' is {settings.device_lane!r} beside {ranks} tensor parallel ranks: "
        "where two ranks start the lane's transfers and the model's collectives in different "
        "order, both wait for each other and the engine hangs; use 'off', or accept the risk "
        "with 'device_lane_forced'"
    )
