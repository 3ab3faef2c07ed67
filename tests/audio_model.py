"""A small Qwen2-Audio with seeded random weights, and clips for it.

Of the architectures that load without torchvision it is the one that takes requests with metadata
alone: vLLM knows which of its fields say how many tokens an item has.
"""

import base64
import io
import json
import math
import os
import shutil
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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
_NAME = "audio-1"
"""Raise the number when the files change."""


def ensure_audio_model(directory: Path) -> Path:
    """The model's directory; made once, safe against two callers at the same time."""
    target = directory / _NAME
    if not target.is_dir():
        draft = directory / f".{_NAME}.{os.getpid()}"
        draft.mkdir(parents=True)
        _write(draft)
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
    for name, content in _settings().items():
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2))
    _write_tokenizer(directory)
    tensors = {plan.name: make_tensor(plan, seed=0) for plan in _plans()}
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
    language = {
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
    return {
        "config": {
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "audio_config": audio,
            "audio_token_index": _SPECIAL_TOKENS.index(AUDIO_TOKENS[0]),
            "model_type": "qwen2_audio",
            "text_config": language | ids,
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


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    entries = [*_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    entries += [f"<unused_{number}>" for number in range(_VOCABULARY - len(entries))]
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))


def _plans() -> Iterator[WeightPlan]:
    """Scales as in `examples.demo.weights`: the tokens then depend on the clip."""
    tower, language = "audio_tower", "language_model.model"
    yield from _linear(f"{tower}.conv1", _TOWER, _MEL_BINS, 3, gain=2.0)
    yield from _linear(f"{tower}.conv2", _TOWER, _TOWER, 3)
    yield WeightPlan(f"{tower}.embed_positions.weight", (_POSITIONS, _TOWER), 0.3)
    for index in range(_TOWER_LAYERS):
        layer = f"{tower}.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{layer}.self_attn.{name}", _TOWER, _TOWER, bias=name != "k_proj")
        yield from _linear(f"{layer}.fc1", _TOWER_FFN, _TOWER)
        yield from _linear(f"{layer}.fc2", _TOWER, _TOWER_FFN)
        yield from _norm(f"{layer}.self_attn_layer_norm", _TOWER)
        yield from _norm(f"{layer}.final_layer_norm", _TOWER)
    yield from _norm(f"{tower}.layer_norm", _TOWER)
    yield from _linear("multi_modal_projector.linear", _TEXT, _TOWER)
    yield WeightPlan(f"{language}.embed_tokens.weight", (_VOCABULARY, _TEXT), 1.0)
    narrow = _TEXT // _HEADS * _KV_HEADS
    for index in range(_TEXT_LAYERS):
        layer = f"{language}.layers.{index}"
        yield from _linear(f"{layer}.self_attn.q_proj", _TEXT, _TEXT, gain=2.0)
        yield from _linear(f"{layer}.self_attn.k_proj", narrow, _TEXT, gain=2.0)
        yield from _linear(f"{layer}.self_attn.v_proj", narrow, _TEXT)
        yield from _linear(f"{layer}.self_attn.o_proj", _TEXT, _TEXT, gain=2.0, bias=False)
        yield from _linear(f"{layer}.mlp.gate_proj", _TEXT_FFN, _TEXT, bias=False)
        yield from _linear(f"{layer}.mlp.up_proj", _TEXT_FFN, _TEXT, bias=False)
        yield from _linear(f"{layer}.mlp.down_proj", _TEXT, _TEXT_FFN, bias=False)
        yield from list(_norm(f"{layer}.input_layernorm", _TEXT))[:1]
        yield from list(_norm(f"{layer}.post_attention_layernorm", _TEXT))[:1]
    yield from list(_norm(f"{language}.norm", _TEXT))[:1]
    yield from _linear("language_model.lm_head", _VOCABULARY, _TEXT, gain=8.0, bias=False)


def _linear(
    root: str, outputs: int, *inputs: int, gain: float = 1.0, bias: bool = True
) -> Iterator[WeightPlan]:
    std = gain / math.sqrt(math.prod(inputs))
    yield WeightPlan(f"{root}.weight", (outputs, *inputs), std)
    if bias:
        yield WeightPlan(f"{root}.bias", (outputs,), 0.1)


def _norm(root: str, width: int) -> Iterator[WeightPlan]:
    yield WeightPlan(f"{root}.weight", (width,), 0.1, mean=1.0)
    yield WeightPlan(f"{root}.bias", (width,), 0.1)
