"""Which layouts of workers our connectors serve, by vLLM's own configurations of them."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import ParallelConfig
from vllm.v1.executor import Executor, ray_utils
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from connectors.kv.engine import validate_cache
from connectors.settings import validate_engine
from lookup_buffer.errors import ConfigError
from test_kv_start import FullAttentionSpec, cache, config

EXTERNAL = "external_launcher"


class RayExecutor(Executor):  # type: ignore[misc]
    """What vLLM's own two declare, which cannot be imported without Ray."""

    uses_ray = True


SERVED: dict[str, dict[str, Any]] = {
    "one worker": {},
    "tensor parallel": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "tensor and data parallel": {
        "tensor_parallel_size": 2,
        "data_parallel_size": 2,
        "distributed_executor_backend": "mp",
    },
    "an engine on each of two hosts": {
        "tensor_parallel_size": 2,
        "data_parallel_size": 2,
        "data_parallel_size_local": 1,
        "nnodes": 2,
        "distributed_executor_backend": "mp",
    },
    "one worker, launched from outside": {"distributed_executor_backend": EXTERNAL},
    "one worker, by ray": {"distributed_executor_backend": "ray"},
}
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "launched from outside": (
        {"tensor_parallel_size": 2, "distributed_executor_backend": EXTERNAL},
        (EXTERNAL, "use the backend mp"),
    ),
    "by the executor's class": (
        {
            "tensor_parallel_size": 2,
            "distributed_executor_backend": ExecutorWithExternalLauncher,
        },
        (EXTERNAL, "use the backend mp"),
    ),
    "data parallel, launched from outside": (
        {"data_parallel_size": 2, "distributed_executor_backend": EXTERNAL},
        (EXTERNAL, "use the backend mp"),
    ),
    "by ray": (
        {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
        ("backend=ray", "use the backend mp"),
    ),
    "by ray's executor": (
        {"tensor_parallel_size": 2, "distributed_executor_backend": RayExecutor},
        ("backend=ray", "use the backend mp"),
    ),
    "engines placed by ray": (
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "data_parallel_backend": "ray"},
        ("backend=ray", "use the backend mp"),
    ),
    "one engine on two hosts": (
        {"tensor_parallel_size": 2, "nnodes": 2, "distributed_executor_backend": "mp"},
        ("--nnodes", "keep each engine on one host"),
    ),
    "two engines on four hosts": (
        {
            "tensor_parallel_size": 2,
            "data_parallel_size": 2,
            "data_parallel_size_local": 1,
            "nnodes": 4,
            "distributed_executor_backend": "mp",
        },
        ("--nnodes", "keep each engine on one host"),
    ),
}


def engine(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RANK", "0")  # as a launcher sets them
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ray_utils, "assert_ray_available", lambda: None)
    made = config()
    made.model_config.multimodal_config = SimpleNamespace()
    made.parallel_config = ParallelConfig(**arguments)
    return made


@pytest.mark.parametrize("layout", SERVED)
def test_layouts_that_both_connectors_serve(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(SERVED[layout], monkeypatch)
    validate_engine(made)
    validate_cache(made, cache(FullAttentionSpec))


@pytest.mark.parametrize("layout", REFUSED)
def test_other_layouts_are_refused_with_advice(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, named = REFUSED[layout]
    made = engine(arguments, monkeypatch)
    for refuse in (
        validate_engine,
        lambda made: validate_cache(made, cache(FullAttentionSpec)),
    ):
        with pytest.raises(ConfigError) as caught:
            refuse(made)
        said = str(caught.value)
        assert "\n" not in said
        assert all(name in said for name in (*named, "start this engine without"))
