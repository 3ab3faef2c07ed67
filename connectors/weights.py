"""Which weights an engine runs, and whether they change while it runs.

`weights_source` names them by a version or a commit, or by every byte of their files. It runs
before the model is loaded and costs a stat of each file. `hash_files` reads each file once per
host; for large files `namespace.NamespaceTask` runs it on a thread, which may take minutes.
`DigestCache` keeps digests in the user's cache, by the file's device, inode, size and times of
change. The next start only looks them up.

`WeightsWatch` runs in the worker, in the model's thread, and detects changes; vLLM reports them to
no connector. `WeightsFlag` passes the fact to the scheduler before that promises another load.
"""

import fcntl
import gc
import hashlib
import json
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, Final, Self

from xxhash import xxh3_128

from connectors import hub
from connectors.counters import logger

if TYPE_CHECKING:
    import torch

CHECKPOINT_FORMATS = frozenset(
    {"auto", "hf", "pt", "safetensors", "fastsafetensors", "instanttensor", "npcache", "mistral",
     "runai_streamer", "runai_streamer_sharded", "sharded_state", "tensorizer", "ipc_cache"}
)  # fmt: skip
"""Formats that load the checkpoint's own values. For any other (dummy, a registered loader) only
the format's name, its settings and the seed describe the weights."""
_OTHER_SOURCES: Final = frozenset({"tensorizer", "ipc_cache"})
"""Formats whose weights do not come from the model's folder or repository."""
WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

CHUNK_BYTES = 4 << 20
FILES_KEPT = 4096
LOCK_SECONDS = 600.0
"""How long to wait for another process that hashes; then this one hashes concurrently."""
LOCK_POLL_SECONDS = 0.1
PROGRESS_SECONDS = 30.0
SETTLED_NS = 2_000_000_000
_HEX_DIGITS = 32

ENCODER_NAMES = (
    "vision", "visual", "vit", "image", "audio", "speech", "whisper", "tower", "encoder", "patch",
    "projector", "projection", "connector", "merger", "aligner", "multi_modal", "mm_", "resampler",
)  # fmt: skip
"""Names in checkpoints of the parts that compute encoder outputs."""
_TOWER_MODELS = ("text_model_id", "audio_model_id")
"""Fields of Ultravox' configuration: other models, of which vLLM loads the weights, too."""
_ENCODE_METHOD = "embed_multimodal"
"""The method that vLLM calls to encode media, since 0.12."""
_DIRECTORY = Path("/dev/shm")
"""For flags. vLLM's own processes share memory here, too. An engine's id cannot be guessed."""

FileState = tuple[int, int, int, int, int]
"""Device, inode, size in bytes, mtime and ctime in ns. Every write changes at least one of them."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    name: str
    """Path relative to its folder, the same on every host."""
    path: Path
    state: FileState

    def is_current(self) -> bool:
        """Whether the file is still the same and unchanged."""
        try:
            return state_of(self.path) == self.state
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """What names an engine's weights: one of the three fields. All are empty for weights that are
    generated instead of read."""

    version: str = ""
    """A name that is known without reading a file."""
    files: tuple[WeightFile, ...] = ()
    """The files to hash."""
    unknown: str = ""
    """Why the weights cannot be named."""

    @property
    def mark(self) -> bytes:
        """16 bytes that differ between processes that found different versions, files or
        reasons."""
        states = [(file.name, file.state) for file in self.files]
        found = repr((self.version, states, self.unknown))
        return hashlib.sha256(found.encode("utf-8", "surrogatepass")).digest()[:16]

    def is_current(self) -> bool:
        return all(file.is_current() for file in self.files)


class HashingStopped(Exception):
    """The engine shut down while files were hashed."""


def weights_source(vllm_config: Any, weights_version: str) -> WeightsSource:
    """What names the weights that vLLM is about to load.

    Raises:
        OSError: the state of a file cannot be read; the engine could not load it either.
    """
    if weights_version:
        return WeightsSource(weights_version)
    model, load = vllm_config.model_config, vllm_config.load_config
    if format_of(load) in _OTHER_SOURCES:
        return WeightsSource(
            unknown=f"--load-format {format_of(load)} reads weights from outside the model's folder"
        )
    other = str(getattr(model, "model_weights", None) or "")
    fields = getattr(model, "hf_config", None)
    towers = [str(tower) for name in _TOWER_MODELS if (tower := getattr(fields, name, None))]
    commit = hub.commit_of(model, load)
    if commit and not other and not towers:
        return WeightsSource(f"commit {commit}")
    if other and not Path(other).exists():
        return WeightsSource(unknown="--model-weights names no folder on this host")
    if not all(Path(tower).is_dir() for tower in towers):
        return WeightsSource(
            unknown=f"{' or '.join(_TOWER_MODELS)} of the model names weights of another repository"
        )
    folders = [str(model.model), *([other] if other else []), *towers]
    files = tuple(file for folder in folders for file in _files_of(folder))
    if files:
        return WeightsSource(files=files)
    if format_of(load) not in CHECKPOINT_FORMATS:
        return WeightsSource()
    return WeightsSource(unknown="neither a commit nor a weight file of the model was found")


def format_of(load_config: Any) -> str:
    """vLLM's name of the format in which it reads or generates weights."""
    return str(getattr(load_config.load_format, "value", load_config.load_format))


def _files_of(text: str) -> Iterator[WeightFile]:
    """The weight files of a folder and its subfolders. For a file, those of its folder only."""
    folder = Path(text)
    if folder.is_dir():
        paths = sorted(folder.rglob("*"))
    elif folder.is_file():
        folder = folder.parent
        paths = sorted(folder.iterdir())
    else:
        return
    for path in paths:
        if path.suffix in WEIGHT_SUFFIXES and path.is_file():
            yield WeightFile(path.relative_to(folder).as_posix(), path, state_of(path))


def state_of(path: Path) -> FileState:
    found = path.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def hash_files(
    files: Sequence[WeightFile], cache: "DigestCache | None", is_stopped: threading.Event
) -> dict[FileState, str]:
    """The digest of each file by its state, from the cache if it is there.

    Raises:
        OSError: a file cannot be read.
        HashingStopped: `is_stopped` was set.
    """
    with cache.lock(is_stopped) if cache else nullcontext():
        digests = cache.known(files) if cache else {}
        left = [file for file in files if file.state not in digests]
        progress = _Progress(sum(file.state[2] for file in left))
        for file in left:
            if file.state in digests:  # two names of one file
                continue
            digest = _hash(file.path, progress.add, is_stopped)
            if cache and file.is_current() and _is_settled(file.state):
                cache.add(file.state, digest)
            digests[file.state] = digest
    return digests


def combined(files: Sequence[WeightFile], digests: dict[FileState, str]) -> str:
    """The digest of all files, from their names and contents; equal on every host."""
    lines = sorted(f"{file.name}:{file.state[2]}:{digests[file.state]}\n" for file in files)
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


class DigestCache:
    """Digests of files by their state, in one file that all engines of a user share.

    A cache that cannot be read or written acts as an empty one. Threads and processes may share it.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or _user_cache()
        self._path = self._directory / "weights.json"

    def known(self, files: Sequence[WeightFile]) -> dict[FileState, str]:
        digests = self._read()
        return {f.state: digests[_key(f.state)] for f in files if _key(f.state) in digests}

    def add(self, state: FileState, digest: str) -> None:
        """Call it only while holding the lock."""
        digests = self._read()
        digests.pop(_key(state), None)
        digests[_key(state)] = digest
        kept = dict(list(digests.items())[-FILES_KEPT:])
        with (
            suppress(OSError),
            NamedTemporaryFile(
                "w",
                dir=self._directory,
                prefix=".weights-",
                delete=False,  # made with mode 0600
            ) as file,
        ):
            try:
                json.dump(kept, file)
                file.flush()
                os.replace(file.name, self._path)
            except BaseException:
                os.unlink(file.name)
                raise

    @contextmanager
    def lock(self, is_stopped: threading.Event) -> Iterator[None]:
        """Hold this while hashing, so that engines that start together read each file once.

        If the lock file cannot be created, it locks nothing. After `LOCK_SECONDS` of waiting it
        continues without the lock.

        Raises:
            HashingStopped: `is_stopped` was set before the lock was acquired.
        """
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
            descriptor = os.open(self._directory / "weights.lock", flags, 0o600)
        except OSError:
            yield
            return
        try:
            _acquire(descriptor, is_stopped)
            yield
        finally:
            os.close(descriptor)

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {k: d for k, d in found.items() if isinstance(d, str) and len(d) == _HEX_DIGITS}


class WeightsWatch:
    """Detects in a worker that the weights of the running engine changed.

    vLLM notifies no connector. But every way to new weights (`reload_weights`, a worker extension
    of a training framework) calls the model's `load_weights` or writes into its parameters. Both
    happen in the workers between two steps, while the scheduler waits. A wrapper around
    `load_weights` sets the flag before the first tensor changes. A write shows in the parameters'
    version counters in the next step. A LoRA adapter that is loaded again under its number
    (`load_inplace`) is a change, too: requests that began with the old one go on with it.

    For the model's thread. Create it before the model, or call `find_models`. Call `create_flag`
    before vLLM starts the scheduler, and `start` when the model is loaded.

    Args:
        engine_id: names the flag.
        names: parameters with one of these in their name are watched; if there are none, all are.
        experts_move: whether vLLM exchanges the positions of experts (`enable_eplb`). That changes
            parameters, but no result.
        mark: of the weights' files before the model was loaded; see `WeightsSource`.
        adapters: whether LoRA adapters influence what is stored.
    """

    def __init__(
        self,
        engine_id: str,
        names: Sequence[str] = ENCODER_NAMES,
        *,
        experts_move: bool = False,
        mark: bytes = b"",
        adapters: bool = False,
    ) -> None:
        from torch.nn.modules.module import register_module_module_registration_hook

        self._names = names
        self._experts_move = experts_move
        self._engine_id = engine_id
        self._mark = mark
        self._flag: WeightsFlag | None = None
        self._changed = False
        self._loaders: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Modules with `load_weights`; the hook finds those with submodules."""
        self._parts: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hook: Any = register_module_module_registration_hook(self._on_registered)
        self._parameters: list[torch.nn.Parameter] = []
        self._version = 0
        """The sum of the parameters' version counters, which only increase."""
        if adapters:
            _report_replaced_adapters(self)

    def _on_registered(
        self, module: "torch.nn.Module", _: str, part: "torch.nn.Module | None"
    ) -> None:
        if hasattr(module, "load_weights"):
            self._loaders.add(module)
        if part is not None:
            self._parts.add(part)

    def find_models(self) -> None:
        """Find models that exist already. Takes some tenths of a second."""
        from torch.nn import Module

        # Not `isinstance`: a proxy's `__class__` may be false, or import a library when read.
        modules = [each for each in gc.get_objects() if issubclass(type(each), Module)]
        for module in modules:
            if hasattr(module, "load_weights"):
                self._loaders.add(module)
            self._parts.update(module.children())

    def create_flag(self) -> None:
        """Create the flag, before vLLM starts the scheduler. Never raises."""
        try:
            self._flag = WeightsFlag.create(self._engine_id, self._mark)
        except OSError as error:
            logger.warning(
                "lookup buffer: the weights flag cannot be created; do not change this engine's "
                "weights in place, as its loads would not stop: %s",
                error,
            )

    def start(self) -> None:
        """Start to watch the loaded model: from now on every write into it is a change.
        Idempotent."""
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = None
        whole = list(self._loaders - self._parts)
        if not whole:
            logger.warning("lookup buffer: no model found; a change of its weights is not detected")
        # Without the draft model, which encodes no media.
        for model in [model for model in whole if hasattr(model, _ENCODE_METHOD)] or whole:
            self._watch(model)
        self._version = self._current_version()
        self._loaders.clear()
        self._parts.clear()

    def _watch(self, model: "torch.nn.Module") -> None:
        own = model.__dict__.get("load_weights")

        def load_weights(*args: Any, **kwargs: Any) -> Any:
            self._report_change()
            if own is not None:
                return own(*args, **kwargs)
            # Looked up at each call: a training framework may replace it.
            kind: Any = type(model)
            return kind.load_weights(model, *args, **kwargs)

        model.load_weights = load_weights  # type: ignore[assignment]
        moved = self._experts_of(model) if self._experts_move else set()
        named = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if not parameter.is_inference() and parameter not in moved
        ]
        encoder = [p for n, p in named if any(word in n.lower() for word in self._names)]
        self._parameters += encoder or [p for _, p in named]

    def _experts_of(self, model: "torch.nn.Module") -> "set[torch.nn.Parameter]":
        """The parameters of the layers with experts."""
        layers = [module for module in model.modules() if hasattr(module, "get_expert_weights")]
        return {parameter for layer in layers for parameter in layer.parameters()}

    def _current_version(self) -> int:
        """Takes a tenth of a millisecond for a thousand parameters."""
        return sum(parameter._version for parameter in self._parameters)

    def _report_change(self) -> None:
        if not self._changed:
            self._changed = True
            if self._flag is not None:
                self._flag.set()

    def changed(self) -> bool:
        """Whether the weights differ from those that the engine started with."""
        self.start()  # some vLLM releases do not report that the model is loaded
        if not self._changed and self._version != self._current_version():
            self._report_change()
        return self._changed

    def close(self) -> None:
        """Idempotent."""
        if self._hook is not None:  # the model was never loaded
            self._hook.remove()
        if self._flag is not None:
            self._flag.close()


_of_adapters: "Final[weakref.WeakSet[WeightsWatch]]" = weakref.WeakSet()


def _report_replaced_adapters(watch: WeightsWatch) -> None:
    """From now on, an adapter that vLLM loads in place of one with its number is a change."""
    from vllm.lora.worker_manager import WorkerLoRAManager as Manager

    _of_adapters.add(watch)
    load: Any = getattr(Manager, "_load_adapter", None)
    if load is None:
        logger.warning("lookup buffer: this vLLM has another LoRA manager; use no load_inplace")
        return
    if getattr(load, "_is_reported", False):
        return

    @wraps(load)
    def load_adapter(manager: Any, lora_request: Any) -> Any:
        was_there = lora_request.lora_int_id in manager.list_adapters()
        loaded = load(manager, lora_request)  # the manager has it once this returns
        # One that was evicted is not there, though requests that wait for it may be.
        if was_there or getattr(lora_request, "load_inplace", False):
            for each in list(_of_adapters):
                each._report_change()
        return loaded

    wrapper: Any = load_adapter
    wrapper._is_reported = True
    Manager._load_adapter = wrapper


class WeightsFlag:
    """A flag in shared memory by which a worker reports to its scheduler that the weights changed.

    Both processes map one byte, and the mark of the weights' files as they were before the worker
    loaded them. There is no other path from worker to scheduler without a step of the engine, and
    the next pass needs the fact. The worker creates the file (`create`). The scheduler, which vLLM
    starts later, opens and unlinks it (`adopt`). So no file is left, however the processes end.
    """

    def __init__(self, path: Path, flags: int, mark: bytes = b"") -> None:
        self._path = path
        descriptor = os.open(path, flags | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user")
            if flags:
                os.write(descriptor, b"\0" + mark)
            self._byte = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

    @classmethod
    def create(cls, engine_id: str, mark: bytes = b"") -> Self:
        """Create the flag, in the worker.

        Raises:
            OSError: the file cannot be created.
        """
        path = _path(engine_id)
        with suppress(FileNotFoundError):
            path.unlink()  # left by an engine with this id that ended during its start
        return cls(path, os.O_CREAT | os.O_EXCL, mark)

    @classmethod
    def adopt(cls, engine_id: str) -> Self:
        """Open the worker's flag and unlink its file, in the scheduler.

        Raises:
            OSError: no worker of this engine created a flag on this host.
        """
        flag = cls(_path(engine_id), 0)
        flag._path.unlink()
        return flag

    @property
    def mark(self) -> bytes:
        """The worker's mark; may be empty."""
        return self._byte[1:]

    def set(self) -> None:
        self._byte[0] = 1

    def is_set(self) -> bool:
        return self._byte[0] != 0

    def close(self) -> None:
        """Remove the file if no scheduler has adopted it. Idempotent."""
        self._path.unlink(missing_ok=True)


def _hash(path: Path, on_bytes: Callable[[int], None], is_stopped: threading.Event) -> str:
    digest, buffer = xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            if is_stopped.is_set():
                raise HashingStopped
            digest.update(buffer[:count])
            on_bytes(count)
    return digest.hexdigest()


class _Progress:
    """Logs a line every `PROGRESS_SECONDS` while files are hashed."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._logged_at = time.monotonic()

    def add(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._logged_at > PROGRESS_SECONDS:
            self._logged_at = time.monotonic()
            message = "lookup buffer: %.1f of %.1f GB of weights are hashed; nothing is shared yet"
            logger.info(message, self._done / 1e9, self._total / 1e9)


def _acquire(descriptor: int, is_stopped: threading.Event) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if is_stopped.wait(LOCK_POLL_SECONDS):
                raise HashingStopped from None
        except OSError:
            return  # a file system without locks


def _is_settled(state: FileState) -> bool:
    """Whether a later write would change the file's times: file systems round times, to 2 s at
    most."""
    return time.time_ns() - max(state[3:]) > SETTLED_NS


def _key(state: FileState) -> str:
    return ":".join(map(str, state))


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or ""
    # Not `Path.expanduser`, which raises without a home directory.
    return Path(base if base.startswith("/") else os.path.expanduser("~/.cache")) / "lookup-buffer"


def _path(engine_id: str) -> Path:
    name = hashlib.sha256(engine_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return _DIRECTORY / f"lookup-buffer-weights-{os.getuid()}-{name}"
