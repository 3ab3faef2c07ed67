"""vLLM's scheduler with a log of what it schedules. Runs in the process of vLLM's engine core.

Only the demo and the end-to-end tests use it, through vLLM's `scheduler_cls`. It changes no
decision and depends on no connector.
"""

from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from examples.demo.schedule_log import Item, Step

LOG_SETTING = "demo_schedule_log"
"""Key in vLLM's `additional_config` that holds the path of the log."""

# Position of the list of images taken from the connector, in what vLLM's method returns.
_EXTERNAL_LOADS = 3


class CountingScheduler(Scheduler):
    """Appends one line to the log for each step with work in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        path = Path(self.vllm_config.additional_config[LOG_SETTING])
        # Line buffered: a line is complete in the file before the step's output is returned.
        self._demo_log = path.open("a", buffering=1, encoding="utf-8")
        self._demo_steps = 0
        self._demo_external: dict[str, list[int]] = {}

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._demo_external.clear()
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens > 0:
            self._demo_steps += 1
            self._demo_log.write(self._demo_step(output).to_line())
        return output

    def _try_schedule_encoder_inputs(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        result = super()._try_schedule_encoder_inputs(request, *args, **kwargs)
        self._demo_external[request.request_id] = list(result[_EXTERNAL_LOADS])
        return result

    def _demo_step(self, output: SchedulerOutput) -> Step:
        scheduled = output.num_scheduled_tokens
        loaded = {name: ids for name, ids in self._demo_external.items() if name in scheduled}
        return Step(
            number=self._demo_steps,
            tokens=output.total_num_scheduled_tokens,
            requests=tuple(scheduled),
            encoded=self._demo_items(output.scheduled_encoder_inputs),
            loaded=self._demo_items(loaded),
        )

    def _demo_items(self, indices: dict[str, list[int]]) -> tuple[Item, ...]:
        return tuple(
            Item(name, self.requests[name].mm_features[index].identifier)
            for name, positions in indices.items()
            for index in positions
        )


class CountingAsyncScheduler(CountingScheduler, AsyncScheduler):
    """The same for engines that schedule a step while the previous one runs.

    That is vLLM's default on GPUs. On CPU vLLM switches it off; this class then schedules one step
    at a time.
    """
