"""Models that no encoder-cache connector fits: just enough of them for an engine's start, which is
refused before it looks for weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import SIZE
from examples.demo.model import model_config


def text_only(folder: Path, tokenizer: Path) -> None:
    _write(folder, "config", model_config(SIZE)["text_config"] | {"model_type": "llama"})
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
    _write(folder, "config", config | sizes)
    _write(folder, "preprocessor_config", features)
    _take_tokenizer(folder, tokenizer, processor="WhisperProcessor")


Misfit = Callable[[Path, Path], None]


def _take_tokenizer(folder: Path, source: Path, *, processor: str | None) -> None:
    shutil.copy(source / "tokenizer.json", folder)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    del settings["processor_class"]
    if processor is not None:
        settings["processor_class"] = processor
    _write(folder, "tokenizer_config", settings)


def _write(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))
