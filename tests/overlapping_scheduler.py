"""Steps that overlap on CPU, where vLLM switches asynchronous scheduling off.

Runs in the process of vLLM's engine core. The engine then plans a step before it has the output of
the one before, as on a GPU: with that step's tokens unknown, its blocks in use, and what is aborted
or preempted meanwhile still being computed. The worker was started before and knows nothing of it:
it computes one step after the other and puts in by itself the tokens that were not known.
"""

from typing import Any

from examples.demo.counting_scheduler import CountingAsyncScheduler


class OverlappingScheduler(CountingAsyncScheduler):
    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # Read by vLLM's scheduler, and behind it by the engine core for the steps under way.
        vllm_config.scheduler_config.async_scheduling = True
        super().__init__(vllm_config, *args, **kwargs)
        transfer = vllm_config.kv_transfer_config
        assert self.defer_block_free == (transfer is not None and transfer.is_kv_consumer)
        self._planned = 0
        self._overlaps = False

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._planned += 1
        return super().schedule(*args, **kwargs)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        self._planned -= 1
        if self._planned > 0 and not self._overlaps:
            self._overlaps = True
            print(OVERLAPS, flush=True)
        return super().update_from_output(*args, **kwargs)


FLAGS = ("--scheduler-cls", "overlapping_scheduler.OverlappingScheduler")
"""For a server that has this folder in its PYTHONPATH: see `openai_servers.overlapping`."""
OVERLAPS = "a step was planned while the one before it ran"
"""In the log of an engine that does."""
