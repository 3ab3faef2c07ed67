"""What the engines of the tests import: `fork_server` has it imported once for all of them.

Importing starts no thread and makes nothing that two processes must not share. Our own modules are
left out: each process imports the connectors by itself.

A process of an engine that reads from another spins for a second after each message, by vLLM's
default. The processes of an engine share one core here, so that took 40 % of its time; here they
sleep after a millisecond.
"""

import importlib

SPIN_SECONDS = 0.001

for name in (
    "compressed_tensors",
    "mistral_common.protocol.instruct.request",
    "transformers.models.idefics3",
    "transformers.models.qwen3",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.idefics3",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
):
    importlib.import_module(name)

_spin = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast").SpinCondition
assert _spin.__init__.__defaults__ == (1,), "busy_loop_s is another argument now"
_spin.__init__.__defaults__ = (SPIN_SECONDS,)
