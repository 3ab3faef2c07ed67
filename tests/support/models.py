"""Models, adapters and hubs for tests with real engines, made on disk with seeded random weights.

The audio model is a small Qwen2-Audio, with clips for it. Of the architectures that load without
torchvision it is the one that takes requests with metadata alone: vLLM knows which of its fields
say how many tokens an item has.

The LoRA adapters are for the model of `engines`. They change the vision tower and nothing else:
what an engine answers with one of them then depends on whose encoder output it was given, and on no
other part of the adapter.

The misfits are models that no encoder-cache connector fits: just enough of them for an engine's
start, which is refused before it looks for weights.

The hub is made by hand: the folders that huggingface_hub keeps what it downloaded in, and a server
that answers of them what vLLM asks a hub before it takes files from there.
"""

import base64
import hashlib
import io
import json
import math
import os
import shutil
import threading
import wave
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engines import SIZE
from examples.demo.model import model_config
from examples.demo.weights import WeightPlan, make_tensor

AUDIO_TOKENS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
SAMPLE_RATE = 16_000
CLIP_SECONDS_MAX = 30
"""Whisper's window, to which every clip is padded; vLLM insists on it."""
CLIP_TOKENS_MAX = 25 * CLIP_SECONDS_MAX
MODEL_TOKENS_MAX = 2048
_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", *AUDIO_TOKENS)
_VOCABULARY = 512
_MEL_BINS, _POSITIONS = 32, 50 * CLIP_SECONDS_MAX
_TOWER, _TOWER_FFN, _TOWER_LAYERS = 64, 128, 2
_TEXT, _TEXT_FFN, _TEXT_LAYERS, _HEADS, _KV_HEADS = 256, 256, 2, 4, 2
EMBEDDING_WIDTH = _TEXT
LANGUAGE_CONFIG = {
    "hidden_size": _TEXT,
    "intermediate_size": _TEXT_FFN,
    "max_position_embeddings": MODEL_TOKENS_MAX,
    "model_type": "qwen2",
    "num_attention_heads": _HEADS,
    "num_hidden_layers": _TEXT_LAYERS,
    "num_key_value_heads": _KV_HEADS,
    "tie_word_embeddings": False,
    "vocab_size": _VOCABULARY,
}
_NAME = "audio-1"
"""Raise the number when the files change."""


def ensure_audio_model(directory: Path) -> Path:
    return ensure_written(directory / _NAME, _write)


def ensure_written(target: Path, write: Callable[[Path], None]) -> Path:
    """The model's directory; made once, safe against two callers at the same time."""
    if not target.is_dir():
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        draft.mkdir(parents=True)
        write(draft)
        try:
            draft.rename(target)
        except OSError:  # another process was faster; its files are equal to ours
            shutil.rmtree(draft)
    return target


def clip(number: int, seconds: float = 1.0) -> dict[str, Any]:
    """A content part: a chord that belongs to this number, as a WAV in a data URL."""
    time = torch.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    tones = [torch.sin(2 * math.pi * hertz * time) for hertz in (150 + 90 * number, 2000 + number)]
    # It moves, or all of its frames would be the same.
    samples = sum(tones) * torch.sin(2 * math.pi * (1 + number % 5) * time) * 0.4
    assert isinstance(samples, torch.Tensor)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE)
        out.writeframes((samples * 32767).to(torch.int16).numpy().tobytes())
    url = f"data:audio/wav;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "audio_url", "audio_url": {"url": url}}


def _write(directory: Path) -> None:
    write_model(directory, _settings(), _SPECIAL_TOKENS, _plans())


def write_model(
    directory: Path,
    settings: Mapping[str, Any],
    special_tokens: Sequence[str],
    plans: Iterable[WeightPlan],
) -> None:
    """Settings by the names of their files; special tokens have the lowest numbers."""
    for name, content in settings.items():
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2))
    _write_tokenizer(directory, special_tokens)
    tensors = {plan.name: make_tensor(plan, seed=0) for plan in plans}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _settings() -> dict[str, dict[str, Any]]:
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    ids = {f"{name}_id": _SPECIAL_TOKENS.index(token) for name, token in special.items()}
    audio = {
        "d_model": _TOWER,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": _TOWER_FFN,
        "encoder_layers": _TOWER_LAYERS,
        "max_source_positions": _POSITIONS,
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": _MEL_BINS,
    }
    return {
        "config": {
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "audio_config": audio,
            "audio_token_index": _SPECIAL_TOKENS.index(AUDIO_TOKENS[0]),
            "model_type": "qwen2_audio",
            "text_config": LANGUAGE_CONFIG | ids,
            **ids,
        },
        "preprocessor_config": {
            "chunk_length": CLIP_SECONDS_MAX,
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": _MEL_BINS,
            "hop_length": SAMPLE_RATE // 100,
            "n_fft": 400,
            "processor_class": "Qwen2AudioProcessor",
            "return_attention_mask": True,
            "sampling_rate": SAMPLE_RATE,
        },
        "processor_config": {"processor_class": "Qwen2AudioProcessor"},
        "tokenizer_config": {
            "model_max_length": MODEL_TOKENS_MAX,
            "processor_class": "Qwen2AudioProcessor",
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
        },
    }


def _write_tokenizer(directory: Path, special_tokens: Sequence[str]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    entries = [*special_tokens, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    entries += [f"<unused_{number}>" for number in range(_VOCABULARY - len(entries))]
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    tokenizer.save(str(directory / "tokenizer.json"))


def _plans() -> Iterator[WeightPlan]:
    """Scales as in `examples.demo.weights`: the tokens then depend on the clip."""
    tower = "audio_tower"
    yield from linear(f"{tower}.conv1", _TOWER, _MEL_BINS, 3, gain=2.0)
    yield from linear(f"{tower}.conv2", _TOWER, _TOWER, 3)
    yield WeightPlan(f"{tower}.embed_positions.weight", (_POSITIONS, _TOWER), 0.3)
    for index in range(_TOWER_LAYERS):
        layer = f"{tower}.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{layer}.self_attn.{name}", _TOWER, _TOWER, bias=name != "k_proj")
        yield from linear(f"{layer}.fc1", _TOWER_FFN, _TOWER)
        yield from linear(f"{layer}.fc2", _TOWER, _TOWER_FFN)
        yield from norm(f"{layer}.self_attn_layer_norm", _TOWER)
        yield from norm(f"{layer}.final_layer_norm", _TOWER)
    yield from norm(f"{tower}.layer_norm", _TOWER)
    yield from linear("multi_modal_projector.linear", _TEXT, _TOWER)
    yield from language_plans()


def language_plans() -> Iterator[WeightPlan]:
    """The model that `LANGUAGE_CONFIG` describes."""
    language = "language_model.model"
    yield WeightPlan(f"{language}.embed_tokens.weight", (_VOCABULARY, _TEXT), 1.0)
    narrow = _TEXT // _HEADS * _KV_HEADS
    for index in range(_TEXT_LAYERS):
        layer = f"{language}.layers.{index}"
        yield from linear(f"{layer}.self_attn.q_proj", _TEXT, _TEXT, gain=2.0)
        yield from linear(f"{layer}.self_attn.k_proj", narrow, _TEXT, gain=2.0)
        yield from linear(f"{layer}.self_attn.v_proj", narrow, _TEXT)
        yield from linear(f"{layer}.self_attn.o_proj", _TEXT, _TEXT, gain=2.0, bias=False)
        yield from linear(f"{layer}.mlp.gate_proj", _TEXT_FFN, _TEXT, bias=False)
        yield from linear(f"{layer}.mlp.up_proj", _TEXT_FFN, _TEXT, bias=False)
        yield from linear(f"{layer}.mlp.down_proj", _TEXT, _TEXT_FFN, bias=False)
        yield from list(norm(f"{layer}.input_layernorm", _TEXT))[:1]
        yield from list(norm(f"{layer}.post_attention_layernorm", _TEXT))[:1]
    yield from list(norm(f"{language}.norm", _TEXT))[:1]
    yield from linear("language_model.lm_head", _VOCABULARY, _TEXT, gain=8.0, bias=False)


def linear(
    root: str, outputs: int, *inputs: int, gain: float = 1.0, bias: bool = True
) -> Iterator[WeightPlan]:
    std = gain / math.sqrt(math.prod(inputs))
    yield WeightPlan(f"{root}.weight", (outputs, *inputs), std)
    if bias:
        yield WeightPlan(f"{root}.bias", (outputs,), 0.1)


def norm(root: str, width: int) -> Iterator[WeightPlan]:
    yield WeightPlan(f"{root}.weight", (width,), 0.1, mean=1.0)
    yield WeightPlan(f"{root}.bias", (width,), 0.1)


RANK = 8
_MODULES = ("fc1", "fc2")
_GAIN = 1.0


def write_adapter(folder: Path, *, seed: int) -> Path:
    """The folder, with an adapter in it; equal seeds make equal files."""
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(_MODULES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, sort_keys=True))
    tensors = {plan.name: make_tensor(plan, seed) for plan in _adapter_plans()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _adapter_plans() -> Iterator[WeightPlan]:
    vision = SIZE.vision
    narrow, wide = vision.hidden, vision.intermediate
    widths = {"fc1": (narrow, wide), "fc2": (wide, narrow)}
    for layer in range(vision.layers):
        for name, (inputs, outputs) in widths.items():
            root = f"base_model.model.model.vision_model.encoder.layers.{layer}.mlp.{name}"
            yield WeightPlan(f"{root}.lora_A.weight", (RANK, inputs), _GAIN * inputs**-0.5)
            yield WeightPlan(f"{root}.lora_B.weight", (outputs, RANK), _GAIN * RANK**-0.5)


def text_only(folder: Path, tokenizer: Path) -> None:
    _write_json(folder, "config", model_config(SIZE)["text_config"] | {"model_type": "llama"})
    _take_tokenizer(folder, tokenizer, processor=None)


def encoder_decoder(folder: Path, tokenizer: Path) -> None:
    layers = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in layers.items()}
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": 64,
        "num_mel_bins": 32,
        "vocab_size": 512,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "decoder_start_token_id": 1,
        **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos"))},
    }
    features = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": 32,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 30,
        "sampling_rate": 16_000,
    }
    _write_json(folder, "config", config | sizes)
    _write_json(folder, "preprocessor_config", features)
    _take_tokenizer(folder, tokenizer, processor="WhisperProcessor")


Misfit = Callable[[Path, Path], None]


def _take_tokenizer(folder: Path, source: Path, *, processor: str | None) -> None:
    shutil.copy(source / "tokenizer.json", folder)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    del settings["processor_class"]
    if processor is not None:
        settings["processor_class"] = processor
    _write_json(folder, "tokenizer_config", settings)


def _write_json(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))


REPOSITORY = "test-org/tiny-model"
_FOLDER = f"models--{REPOSITORY.replace('/', '--')}"


def commit_named(text: str) -> str:
    """A commit's hash, made up."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def add_commit(cache: Path, model: Path, commit: str) -> Path:
    """A snapshot with the files of `model`: links to blobs. Returns its folder."""
    root = cache / _FOLDER
    snapshot, blobs = root / "snapshots" / commit, root / "blobs"
    for folder in (snapshot, blobs, root / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        data = path.read_bytes()
        blob = blobs / hashlib.sha256(data).hexdigest()
        if not blob.exists():
            blob.write_bytes(data)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def point(cache: Path, revision: str, commit: str) -> None:
    """A branch or a tag stands for a commit from now on."""
    (cache / _FOLDER / "refs" / revision).write_text(commit)


def environment(cache: Path, endpoint: str | None = None) -> Mapping[str, str]:
    """For a process that uses this cache: offline, or with the hub at `endpoint`."""
    variables = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0" if endpoint else "1"}
    return variables | ({"HF_ENDPOINT": endpoint} if endpoint else {})


@contextmanager
def hub_over(cache: Path) -> Iterator[str]:
    """A hub that has the snapshots of `cache`. Yields its endpoint."""
    handler = type("Handler", (_Hub,), {"root": cache / _FOLDER})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class _Hub(BaseHTTPRequestHandler):
    """What a revision stands for, which files a commit has, and what each is."""

    root: Path
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0].strip("/").replace("%2F", "/")
        if path.startswith(f"api/models/{REPOSITORY}"):
            kind, _, rest = path.removeprefix(f"api/models/{REPOSITORY}").strip("/").partition("/")
            self._tell(kind, rest.strip("/"))
        elif path.startswith(f"{REPOSITORY}/resolve/"):
            revision, _, name = path.removeprefix(f"{REPOSITORY}/resolve/").partition("/")
            self._file(revision, name)
        else:
            self._send(404, b"{}")

    def _tell(self, kind: str, revision: str) -> None:
        commit = self._commit(revision or "main")
        if commit is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        files = sorted((self.root / "snapshots" / commit).iterdir())
        told: Any = {"id": REPOSITORY, "sha": commit}
        told["siblings"] = [{"rfilename": path.name} for path in files]
        if kind == "tree":
            told = [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": p.resolve().name}
                for p in files
            ]
        self._send(200, json.dumps(told).encode())

    def _file(self, revision: str, name: str) -> None:
        commit = self._commit(revision)
        path = self.root / "snapshots" / (commit or "none") / name
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit or ""})
            return
        named = {"X-Repo-Commit": commit or "", "ETag": f'"{path.resolve().name}"'}
        self._send(200, path.read_bytes(), named)

    def _commit(self, revision: str) -> str | None:
        if (self.root / "snapshots" / revision).is_dir():
            return revision
        ref = self.root / "refs" / revision
        return ref.read_text() if ref.is_file() else None

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""
