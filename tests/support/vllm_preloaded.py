"""What the engines of the tests import: `fork_server` has it imported once for all of them.

Importing starts no thread and makes nothing that two processes must not share. Our own modules are
left out: each process imports the connectors by itself.
"""

import importlib

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
