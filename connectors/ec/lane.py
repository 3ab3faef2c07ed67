"""The worker's pool on its device: made by configuration, filled by what the engine encodes.

Off by default. Knows the buffer's device package; imported only where the setting is on, because
it brings torch's distributed package along.
"""

from contextlib import contextmanager
from typing import TYPE_CHECKING

from connectors.settings import ConnectorSettings
from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from lookup_buffer.client.buffer import LookupBuffer


class WorkerLane:
    """See `DeviceLane`. A worker that never loads begins no pair with others,
    and one that never stores is named to nobody.

    Raises:
        ConfigError: this worker cannot speak that lane.
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

        config = settings.buffer_config()
        self._lane: DeviceLane = DeviceLane(
            settings.device_lane,
            device=device,
            pool_bytes=settings.device_pool_bytes,
            receives=loads,
            offers=stores,
            host=settings.device_lane_host or parse_tcp(settings.listen)[0],
            token=config.token.get_secret_value() if config.token else None,
        )

    def join(self, buffer: "LookupBuffer") -> None:
        buffer.join_lane(self._lane)

    @contextmanager
    def keeping(
        self, namespace: str, key: str, tensor: "torch.Tensor"
    ) -> "Iterator[Callable[[int], None]]":
        """Around the insert of an output that nobody will write to: it is kept, and offered where
        what is yielded was told, with its checksum, that it is stored."""
        stored: list[int] = []
        entry = self._lane.prepare(namespace, key, tensor, immutable=True)
        try:
            yield stored.append
        finally:
            self._lane.settle(entry, stored[0] if stored else None)

    def close(self) -> None:
        self._lane.close()


def refuse_unfit_lane(settings: ConnectorSettings, ranks: int) -> None:
    """Refuse what may hang the engine.

    Raises:
        ConfigError: a lane beside tensor parallelism.
    """
    if settings.device_lane == "off" or ranks == 1 or settings.device_lane_forced:
        return
    raise ConfigError(
        f"setting 'device_lane' is {settings.device_lane!r} beside {ranks} tensor parallel ranks: "
        "transfers of the lane and collectives of the model wait for each other where two ranks "
        "start them in different order, and the engine hangs; use 'off', or take the risk with "
        "'device_lane_forced'"
    )
