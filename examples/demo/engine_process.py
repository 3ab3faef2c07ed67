"""The engine's own process: one real vLLM engine, controlled by JSON lines over a socket.

Main thread: vLLM. A second thread reads the socket, so it detects the end of the controlling
process during an answer too. It then kills its whole process group.
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import Any

Message = dict[str, Any]

# Time for vLLM's own children to end in order; connectors release what they hold in that time.
_SHUTDOWN_SECONDS = 10.0


def main() -> None:
    """Entry point of `python -m examples.demo.engine_process FD`."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    # vLLM's children must not keep the socket open.
    os.set_inheritable(connection.fileno(), False)
    commands: queue.Queue[Message] = queue.Queue(maxsize=16)
    reader = threading.Thread(target=_read_commands, args=(connection, commands), daemon=True)
    reader.start()
    start = commands.get()
    try:
        engine = _Engine(start)
        _send(connection, {"ready": engine.facts})
        while True:
            command = commands.get()
            if "stop" in command:
                break
            _send(connection, {"answers": engine.answer(command["generate"])})
    except Exception as error:  # top of this process: report why it ends
        _send(connection, {"error": f"{type(error).__name__}: {error}"})
        raise
    engine.close()
    # The engine is shut down; unloading 3,000 modules would take another three seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Engine:
    """A `vllm.LLM` and the facts about its start."""

    def __init__(self, start: Message) -> None:
        began = time.monotonic()
        if start["cores"]:
            # vLLM binds a worker to its cores only if the worker has its own process.
            os.sched_setaffinity(0, start["cores"])
        from PIL import Image
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform

        from examples.demo import counting_scheduler as counting

        imported = time.monotonic()
        self._open_image = Image.open
        self._sampling = SamplingParams
        self._llm = LLM(
            **start["arguments"],
            scheduler_cls=counting.CountingScheduler
            if current_platform.is_cpu()
            else counting.CountingAsyncScheduler,
            additional_config={counting.LOG_SETTING: start["schedule_path"]},
        )
        self.facts = {
            "import_seconds": imported - began,
            "start_seconds": time.monotonic() - began,
            "pid": os.getpid(),
        }

    def answer(self, questions: list[Message]) -> list[Message]:
        prompts = []
        for question in questions:
            images = [self._open_image(path).convert("RGB") for path in question["images"]]
            media = {"multi_modal_data": {"image": images}} if images else {}
            if question["token_ids"]:
                prompts.append({"prompt_token_ids": question["token_ids"], **media})
            else:
                prompts.append({"prompt": question["prompt"], **media})
        sampling = [self._sample(question) for question in questions]
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return [self._describe(output) for output in outputs]

    def _sample(self, question: Message) -> Any:
        """Greedy, always with the requested number of tokens: a random model may emit "end"."""
        transfer = question["kv_transfer_params"]
        return self._sampling(
            temperature=0.0,
            max_tokens=question["tokens"],
            ignore_eos=True,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown(timeout=_SHUTDOWN_SECONDS)

    @staticmethod
    def _describe(output: Any) -> Message:
        metrics, completion = output.metrics, output.outputs[0]
        return {
            "request": output.request_id,
            "tokens": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "kv_transfer_params": output.kv_transfer_params,
            "queued_seconds": metrics.scheduled_ts - metrics.queued_ts,
            "ttft_seconds": metrics.first_token_ts - metrics.queued_ts,
        }


def _read_commands(connection: socket.socket, commands: "queue.Queue[Message]") -> None:
    with connection.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            command = json.loads(line)
            commands.put(command)
            if "stop" in command:
                return
    # End of file without "stop": the controlling process has ended and cannot clean up.
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _send(connection: socket.socket, message: Message) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
