"""vLLM's own scheduler with our KV connector and its workers, turn by turn; only the model is made
up, and the threads of the workers run when the drive lets them.

The made-up model has one number of KV for each token and rank, a digest of all tokens up to it. So
`DrivenKvEngine` can tell before each step whether all KV that vLLM takes for computed is right, and
after it whether the answer is. Nothing depends on time: the clock is moved by the drive.
"""

import hashlib
import random
import struct
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import torch

from connectors.identifiers import Adapters
from connectors.kv import rank as kv_rank
from connectors.kv.chunks import ChunkChain, key_of
from connectors.kv.engine import parse_kv_settings
from connectors.kv.metadata import ChunkLoad
from connectors.kv.rank import kv_shape
from connectors.kv.scheduler import KvScheduler
from connectors.kv.worker import KvWorker, LoadQueue, PagedChunk
from connectors.plugin import KV_CONNECTOR_MODULE, KV_CONNECTOR_NAME
from kv_ledger import KvLedger
from patience import scaled

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    import host_checks

BLOCK: Final = 4
CHUNK: Final = 8
"""Tokens of a block, and of a chunk."""
CHUNK_BYTES: Final = 8 * CHUNK
TURN_SECONDS: Final = 0.1
ANSWERS: Final = 50
"""The made-up model knows so many tokens."""


@dataclass(frozen=True, slots=True)
class KvRoom:
    """How little the engine has of everything, and what kind of engine it is."""

    role: str
    ranks: int
    is_async: bool
    by_new_runner: bool
    prefix_caching: bool
    policy: str
    blocks: int
    step_tokens: int
    requests: int
    whole_prompts: bool
    store_generated: bool
    save_queue_items: int
    pinned_chunks: int

    @classmethod
    def by_chance(cls, chance: random.Random) -> "KvRoom":
        return cls(
            role=chance.choice(["kv_both"] * 4 + ["kv_producer", "kv_consumer"]),
            ranks=chance.choice([1, 2]),
            is_async=chance.random() < 0.5,
            by_new_runner=chance.random() < 0.4,
            prefix_caching=chance.random() < 0.7,
            policy=chance.choice(["fcfs", "priority"]),
            blocks=chance.choice([10, 14, 20, 40]),
            step_tokens=chance.choice([8, 16, 40]),
            requests=chance.choice([2, 4, 8]),
            whole_prompts=chance.random() < 0.5,
            store_generated=chance.random() < 0.8,
            save_queue_items=chance.choice([1, 3, 100]),
            pinned_chunks=chance.choice([2, 6, 1000]),
        )


class Transcript:
    """A prompt, what the made-up model answers, and the KV of both."""

    def __init__(self, prompt: Sequence[int], salt: str, answer: int) -> None:
        self.prompt, self.salt, self.answer = list(prompt), salt, answer
        self.tokens: list[int] = []
        self._values: list[int] = []
        self._digest = hashlib.sha256(salt.encode())
        for token in prompt:
            self._add(token)
        for _ in range(answer):
            self._add(self._values[-1] % ANSWERS)

    def _add(self, token: int) -> None:
        self._digest.update(struct.pack("q", token))
        self.tokens.append(token)
        self._values.append(int.from_bytes(self._digest.digest()[:7], "big"))

    def kv(self, rank: int) -> torch.Tensor:
        return torch.tensor(self._values) * 2 + rank

    def chunks(self, rank: int) -> dict[str, list[int]]:
        """By key, the KV of each chunk."""
        request = SimpleNamespace(request_id="", mm_features=(), cache_salt=self.salt)
        chain = ChunkChain(request, CHUNK, Adapters())
        kv = self.kv(rank).tolist()
        names = chain.grow(self.tokens, len(self.tokens))
        return {
            key_of(name, rank).text: kv[index * CHUNK : (index + 1) * CHUNK]
            for index, name in enumerate(names)
        }


class Turnstile:
    """Lets a thread do one piece of its work at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits = self._may_pass = self._is_open = False

    def enter(self) -> None:
        """In the thread, before each piece of its work."""
        with self._changed:
            self._waits = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._may_pass or self._is_open)
            self._waits = self._may_pass = False

    def waits(self, is_idle: Callable[[], bool]) -> bool:
        """Whether a piece waits to be let through; False if the thread has nothing to do. Until one
        of both is so."""
        deadline = time.monotonic() + scaled(30.0)
        with self._changed:
            while not self._waits and not is_idle():
                assert time.monotonic() < deadline, "a thread neither works nor waits"
                self._changed.wait(0.0005)
            return self._waits

    def let_one_through(self) -> None:
        with self._changed:
            self._waits, self._may_pass = False, True
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


class HeldWorker(KvWorker):
    """The worker of one rank, whose three threads work when they are let."""

    def __init__(self, ledger: KvLedger, settings: Any, *, rank: int, blocks: int) -> None:
        self._saving, self._loading, self._taking = Turnstile(), Turnstile(), Turnstile()
        self._under_way: dict[str, bool] = {}
        """Requests whose load has not ended, and whether it is of a hand-off."""
        self._loaded: set[str] = set()
        self._lost: set[int] = set()
        super().__init__(lambda: ledger, settings, rank=rank, num_blocks=blocks)  # type: ignore[arg-type, return-value]
        self.loads.close(10.0)
        self.loads = LoadQueue(self._copy_in, self.counters, self._log, handoff_threads=1)
        cache = torch.zeros(blocks, 1, BLOCK, 2, dtype=torch.float32)
        self.register({"0": cache})
        self.cache = cache.view(torch.int64).view(blocks * BLOCK)

    def _insert(self, text: str, chunk: PagedChunk) -> bool:
        self._saving.enter()
        return super()._insert(text, chunk)

    def _copy_in(self, chunk: ChunkLoad, after: Any, seconds: float) -> None:
        (self._taking if chunk.transfer else self._loading).enter()
        super()._copy_in(chunk, after, seconds)

    def load(self, metadata: Any) -> None:
        for load in metadata.loads:
            self._under_way[load.request_id] = any(chunk.transfer for chunk in load.chunks)
        super().load(metadata)

    def work(self, may: Callable[[], bool]) -> None:
        """Let each thread do its work, piece by piece, for as long as it `may`."""
        turnstiles: list[tuple[Turnstile, Callable[[], bool]]] = [
            (self._loading, partial(self._has_loaded, False)),
            (self._taking, partial(self._has_loaded, True)),
            (self._saving, self._has_saved),
        ]
        for turnstile, is_idle in turnstiles:
            while turnstile.waits(is_idle) and may():
                turnstile.let_one_through()

    def _has_saved(self) -> bool:
        return self.saves.drain(0.0)

    def _has_loaded(self, handoffs: bool) -> bool:
        results = self.results()
        self._loaded |= results.loaded
        self._lost |= results.lost_blocks
        for request in results.loaded:
            self._under_way.pop(request, None)
        return handoffs not in self._under_way.values()

    def output(self) -> KVConnectorOutput:
        """What the worker reports of a step."""
        loaded, self._loaded = self._loaded, set()
        lost, self._lost = self._lost, set()
        return KVConnectorOutput(
            finished_recving=loaded or None,
            invalid_block_ids=lost,
            kv_connector_worker_meta=self.report(),
        )

    def close(self) -> None:
        for each in (self._saving, self._loading, self._taking):
            each.open()
        super().close()


class DrivenKvEngine:
    """See the module.

    Args:
        chance: decides when the workers' threads work.
    """

    def __init__(self, room: KvRoom, ledger: KvLedger, chance: random.Random) -> None:
        self.room, self._ledger, self._chance = room, ledger, chance
        self._now = 1000.0
        self._extra = {
            "chunk_tokens": CHUNK,
            "behind_router": True,
            "fetch_wait_seconds": 2 * TURN_SECONDS,
            "handoff_wait_seconds": 4 * TURN_SECONDS,
            "capacity_bytes": "1MiB",
            "store_generated": room.store_generated,
            "save_queue_items": room.save_queue_items,
            "prefetch_bytes": room.pinned_chunks * room.ranks * CHUNK_BYTES,
        }
        self._config = self._host_config()
        with patch.object(kv_rank, "open_buffer", return_value=ledger):
            self.scheduler = host_checks.host_scheduler(
                self._config,
                kind=AsyncScheduler if room.is_async else Scheduler,
                blocks=room.blocks,
            )
        self.scheduler.use_v2_model_runner = room.by_new_runner
        settings = parse_kv_settings(self._extra)
        shape = kv_shape(self._config, self.scheduler.kv_cache_config, settings)
        self.side = KvScheduler(ledger, settings, shape, clock=lambda: self._now)  # type: ignore[arg-type]
        self.scheduler.connector.scheduler = self.side
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._workers = [
            HeldWorker(ledger, settings, rank=rank, blocks=room.blocks)
            for rank in range(room.ranks)
        ]
        self._aggregator = KVOutputAggregator(room.ranks)
        self._flying: deque[Any] = deque()
        self._depth: int = self._config.max_concurrent_batches
        assert self._depth == 1 + room.is_async
        self._transcripts: dict[str, Transcript] = {}
        self._blocks: dict[str, list[int]] = {}
        self._tokens: dict[str, int] = {}
        """By request: how long it is, as far as its tokens are known to the worker."""
        self._answers: dict[str, list[int]] = {}
        self.handed_out: list[tuple[Transcript, dict[str, Any]]] = []
        """Prompts for another engine to go on with, and what it is to be told."""
        self.preemptions = 0

    def _host_config(self) -> Any:
        room = self.room
        config = host_checks.host_config(
            "ec_both",
            scheduling={
                "max_num_batched_tokens": room.step_tokens,
                "max_num_seqs": room.requests,
                "policy": room.policy,
                "scheduler_reserve_full_isl": room.whole_prompts,
            },
            caching={"block_size": BLOCK, "enable_prefix_caching": room.prefix_caching},
        )
        config.ec_transfer_config = None
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=KV_CONNECTOR_NAME,
            kv_connector_module_path=KV_CONNECTOR_MODULE,
            kv_role=room.role,
            kv_connector_extra_config=self._extra,
            engine_id="driven",
        )
        # Set late: vLLM decides against them for a configuration that no executor has.
        config.scheduler_config.async_scheduling = room.is_async
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
        config.parallel_config.tensor_parallel_size = room.ranks
        return config

    # -- its clients

    def add(
        self, request_id: str, transcript: Transcript, *, told: dict[str, Any] | None, **values: Any
    ) -> None:
        """`told`: its `kv_transfer_params`."""
        for rank in range(self.room.ranks):
            self._ledger.expected |= transcript.chunks(rank)
        skips = values.pop("skip_reading_prefix_cache", None)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(transcript.prompt),
            sampling_params=SamplingParams(
                max_tokens=transcript.answer, ignore_eos=True, skip_reading_prefix_cache=skips
            ),
            pooling_params=None,
            mm_features=[],
            cache_salt=transcript.salt or None,
            block_hasher=self._hasher,
            **values,
        )
        request.kv_transfer_params = told
        self._transcripts[request_id], self._answers[request_id] = transcript, []
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def reset(self, *, running: bool) -> None:
        """As vLLM's `/reset_prefix_cache`; `running`: also with requests that run."""
        loads = any(
            one.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            for one in self.scheduler.requests.values()
        )
        self.scheduler.reset_prefix_cache(
            reset_running_requests=running and not loads and not self._flying, reset_connector=True
        )

    @property
    def unfinished(self) -> list[str]:
        return [name for name, one in self.scheduler.requests.items() if not one.is_finished()]

    # -- its loop

    def step(self) -> None:
        """Schedule one step ahead; the oldest runs when no more may be in flight."""
        self._now += TURN_SECONDS
        if len(self._flying) == self._depth:
            self._finish_oldest()
        if self.scheduler.has_requests():
            self._flying.append(self._schedule())
        elif self._flying:
            self._finish_oldest()

    def _schedule(self) -> Any:
        before = {name: one.num_preemptions for name, one in self.scheduler.requests.items()}
        output = self.scheduler.schedule()
        for name, one in self.scheduler.requests.items():
            self.preemptions += one.num_preemptions - before[name]
        return output

    def _finish_oldest(self) -> None:
        output = self._flying.popleft()
        ended = self.scheduler.update_from_output(output, self._execute(output))
        for one in (one for outputs in ended.values() for one in outputs.outputs):
            transcript, answer = self._transcripts[one.request_id], self._answers[one.request_id]
            answer += one.new_token_ids
            right = transcript.tokens[len(transcript.prompt) :]
            assert answer == right[: len(answer)], f"{one.request_id} answers {answer}, not {right}"
            if one.finish_reason is not None and one.kv_transfer_params:
                self.handed_out.append((transcript, one.kv_transfer_params))

    def _execute(self, output: Any) -> Any:
        """As `GPUModelRunner.execute_model`, in each rank."""
        metadata = output.kv_connector_metadata
        self._work()
        for worker in self._workers:
            worker.copy_out_before_writes(metadata)
            worker.load(metadata)
        self._work()
        sampled = self._forward(output, self._follow(output))
        for worker in self._workers:
            worker.save(metadata)
        self._work()
        outputs = [
            ModelRunnerOutput(
                req_ids=list(sampled),
                req_id_to_index={name: index for index, name in enumerate(sampled)},
                sampled_token_ids=list(sampled.values()),
                kv_connector_output=worker.output(),
            )
            for worker in self._workers
        ]
        return self._aggregator.aggregate(outputs, 0)

    def _work(self) -> None:
        for worker in self._workers:
            worker.work(lambda: self._chance.random() < 0.5)

    def _follow(self, output: Any) -> dict[str, int]:
        """Follow vLLM's blocks and tokens of each request; how many of these are computed."""
        computed = {}
        for new in output.scheduled_new_reqs:
            name = new.req_id
            computed[name], self._blocks[name] = new.num_computed_tokens, list(new.block_ids[0])
            tokens = new.prefill_token_ids if self.room.by_new_runner else new.prompt_token_ids
            self._tokens[name] = len(tokens)
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            computed[name] = cached.num_computed_tokens[index]
            blocks = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                self._blocks[name] = list(blocks[0])
                prompt = len(self._transcripts[name].prompt)
                self._tokens[name] = prompt + cached.num_output_tokens[index]
            elif blocks:
                self._blocks[name] += blocks[0]
        return computed

    def _forward(self, output: Any, computed: dict[str, int]) -> dict[str, list[int]]:
        """Read the KV of what is computed, write that of the step's tokens; a token for each
        request whose end the step reaches."""
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            start, end = computed[name], computed[name] + count
            places = torch.tensor(self._blocks[name])[:, None] * BLOCK + torch.arange(BLOCK)
            places = places.flatten()
            for rank, worker in enumerate(self._workers):
                kv = self._transcripts[name].kv(rank)
                wrong = (worker.cache[places[:start]] != kv[:start]).nonzero().flatten().tolist()
                assert not wrong, f"{name}, rank {rank}: wrong KV of {wrong} of {start} tokens"
                worker.cache[places[start:end]] = kv[start:end]
            sampled[name] = []
            if end >= self._tokens[name]:
                sampled[name] = [self._transcripts[name].tokens[end]]
                self._tokens[name] = end + 1
        return sampled

    # -- its end

    def come_to_rest(self) -> None:
        """With no request left: nothing is held."""
        assert self.unfinished == []
        while self._flying or self.scheduler.has_requests():
            self.step()
        for worker in self._workers:
            worker.work(lambda: True)
        for _ in range(self._depth + 1):
            self._flying.append(self._schedule())
            self._finish_oldest()
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == self.room.blocks - 1, "vLLM keeps one block for itself"
        side: Any = self.side
        handoffs = side._handoffs
        assert not any((side._requests, side._ended)), "requests that have ended"
        awaited = (handoffs._awaited, handoffs._takers, handoffs._loading)
        assert not any(awaited), awaited
        assert side._pins._held_bytes == 0

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self.scheduler.shutdown()
