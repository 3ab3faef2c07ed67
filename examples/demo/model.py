"""Writes the demo's model to a directory from which vLLM loads it without any download.

Files: configuration, image processor (the PIL one: no torchvision), a byte-level tokenizer of 512
entries, and seeded random weights (`weights.py`). Imports neither vLLM nor transformers.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.demo.model_size import ModelSize

VOCABULARY = 512
IMAGE_TOKEN = "<image>"
MAX_POSITIONS = 8192

_SPECIAL_TOKENS = (
    "<pad>",
    "<s>",
    "</s>",
    "<fake_token_around_image>",
    IMAGE_TOKEN,
    "<global-img>",
    "<end_of_utterance>",
)

Progress = Callable[[int, int], None]
"""Called with (values made so far, values in all)."""


def ensure_model(
    size: ModelSize, directory: Path, *, seed: int = 0, progress: Progress | None = None
) -> Path:
    """The directory of the model, written below `directory` unless an earlier run left it there.

    Safe against a kill in the middle and against two callers at once: files are written into a
    directory of this process and renamed at the end.
    """
    target = directory / f"{size.name}-{size.digest(seed)}"
    if target.is_dir():
        return target
    draft = directory / f".{target.name}.{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        write_model(size, draft, seed=seed, progress=progress)
        try:
            draft.rename(target)
        except OSError:
            # Another process was faster; its files are equal.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def write_model(
    size: ModelSize, directory: Path, *, seed: int = 0, progress: Progress | None = None
) -> None:
    """Writes all files of the model into an existing directory."""
    _write_json(directory / "config.json", model_config(size))
    _write_json(directory / "generation_config.json", {"pad_token_id": _token_id("<pad>")})
    _write_json(directory / "preprocessor_config.json", image_processor_config(size))
    _write_json(directory / "processor_config.json", processor_config(size))
    _write_tokenizer(directory)
    _write_weights(size, directory, seed=seed, progress=progress)


def model_config(size: ModelSize) -> dict[str, Any]:
    """The content of config.json."""
    vision, text = size.vision, size.text
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "dtype": "float32",
        "image_token_id": _token_id(IMAGE_TOKEN),
        "pad_token_id": _token_id("<pad>"),
        "bos_token_id": _token_id("<s>"),
        "eos_token_id": _token_id("</s>"),
        "scale_factor": 1,
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "idefics3_vision",
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "hidden_size": vision.hidden,
            "intermediate_size": vision.intermediate,
            "num_hidden_layers": vision.layers,
            "num_attention_heads": vision.heads,
        },
        "text_config": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCABULARY,
            "hidden_size": text.hidden,
            "intermediate_size": text.intermediate,
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "num_key_value_heads": text.kv_heads,
            "head_dim": text.head_dim,
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-5,
            "pad_token_id": _token_id("<pad>"),
            "bos_token_id": _token_id("<s>"),
            "eos_token_id": _token_id("</s>"),
            "tie_word_embeddings": False,
        },
    }


def image_processor_config(size: ModelSize) -> dict[str, Any]:
    """The content of preprocessor_config.json: one square tile per photograph."""
    edge = {"longest_edge": size.vision.image_size}
    return {
        "image_processor_type": "Idefics3ImageProcessorPil",
        "do_convert_rgb": True,
        "do_image_splitting": False,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": edge,
        "size": edge,
    }


def processor_config(size: ModelSize) -> dict[str, Any]:
    """The content of processor_config.json."""
    return {
        "processor_class": "Idefics3Processor",
        "image_seq_len": size.embeddings_per_image,
    }


def _token_id(token: str) -> int:
    return _SPECIAL_TOKENS.index(token)


def _write_tokenizer(directory: Path) -> None:
    # Imported here: only writing a model needs it. It is installed with vLLM.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*_SPECIAL_TOKENS, *alphabet]
    entries += [f"<unused_{number}>" for number in range(VOCABULARY - len(entries))]
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in _SPECIAL_TOKENS]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Idefics3Processor",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "additional_special_tokens": list(_SPECIAL_TOKENS[3:]),
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _write_weights(
    size: ModelSize, directory: Path, *, seed: int, progress: Progress | None
) -> None:
    # Imported here: torch takes seconds, and `--help` and tests of the configuration need none.
    from safetensors.torch import save_file

    from examples.demo.weights import make_tensor, plan_weights

    plans = plan_weights(size, VOCABULARY)
    total = sum(plan.numel for plan in plans)
    tensors, made = {}, 0
    for plan in plans:
        tensors[plan.name] = make_tensor(plan, seed)
        made += plan.numel
        if progress is not None:
            progress(made, total)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
