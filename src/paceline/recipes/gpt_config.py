"""Settings of the gpt recipe, and the architecture that follows from them, the initial weights and the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from paceline.config import BatchConfig, LrConfig, RunConfig
from paceline.config.given import with_values
from paceline.data.vocabulary import SMALLEST_VOCABULARY, TOKENIZER, Vocabulary
from paceline.errors import ConfigError
from paceline.recipes.gpt_hf_weights import read_gpt2
from paceline.recipes.gpt_model import SHAPES, Design, Shape


@dataclass(frozen=True)
class GptConfig(RunConfig):
    """A GPT on text."""

    name: str = "gpt"
    epochs: int = 1
    steps: int = 300
    clip_norm: float = 1.0
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(global_size=32))
    lr: LrConfig = field(
        default_factory=lambda: LrConfig(
            base=3e-3, reference_batch=32, schedule="cosine", warmup_samples=640, final=0.1
        )
    )
    size: Literal["nano", "mini", "124M", "350M", "774M", "1.5B"] = "nano"
    """Model size: a preset of layers, heads and embedding_dim."""
    layers: int = 0
    """Transformer blocks; 0: those of the size."""
    heads: int = 0
    """Attention heads; 0: those of the size."""
    embedding_dim: int = 0
    """Embedding width; 0: that of the size."""
    context_length: int = 128
    """Context length in tokens: the length of a training sequence."""
    vocab_size: int = 0
    """Vocabulary size of the model; 0: that of the text."""
    positions: Literal["learned", "rotary"] = "learned"
    """Positional embedding: learned, or rotary (RoPE)."""
    activation: Literal["gelu", "relu2"] = "gelu"
    """Activation of the MLP: GELU, or squared ReLU."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm, or RMSNorm."""
    bias: bool = True
    """Biases in linear layers and norms."""
    dropout: float = 0.0
    """Dropout probability."""
    recompute: bool = False
    """Activation checkpointing: recompute each block in backward; less memory, a third more compute."""
    fp8_head: bool = False
    """Compute the output layer and the loss in fp8 while training: 8 % faster with a vocabulary of 50,000 tokens. Needs Triton and compute capability 8.9 or higher (L4, H100)."""
    init_from: str = ""
    """Start from GPT-2 weights in this folder (Hugging Face layout); they set size, vocab_size and context_length."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon for the weight matrices of the blocks and AdamW for the rest."""
    weight_decay: float = 0.1
    """Weight decay of matrices; biases and norms have none."""
    data: Literal["text", "shards"] = "text"
    """Text in memory, or shards that are streamed."""
    data_folder: str = ""
    """File or folder of text, or folder or address of the datasets `train` and `test`; empty: the Python standard library."""
    windows: Literal["disjoint", "overlapping"] = "disjoint"
    """Training sequences of a text in memory. disjoint: one after the other, every 20th held out; overlapping: starting at
    every token of the first 90 %, the last 10 % held out."""
    level: Literal["bytes", "characters", "tokens"] = "bytes"
    """What a token of a text in memory is: a byte, a character, or a token of a tokenizer. Shards store it."""
    tokenizer: str = ""
    """A tokenizer.json for level=tokens."""
    train_tokenizer: int = 0
    """Train a byte-level BPE tokenizer of this vocabulary size on the text, for level=tokens."""

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        super().__post_init__()
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value < least:
                raise ConfigError(
                    f"{name} must be at least {least}, got {value}",
                    fix=f"set {name}={least} or more",
                )
        if self.windows == "overlapping" and self.data == "shards":
            raise ConfigError(
                "windows=overlapping does not apply to data=shards, whose sequences are fixed",
                fix="remove windows=",
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                f"dropout must be at least 0 and below 1, got {self.dropout}", fix="set dropout=0.1"
            )
        if self.fp8_head and (self.parallel == "fsdp" or self.precision == "fp16"):
            given = "parallel=fsdp" if self.parallel == "fsdp" else "precision=fp16"
            raise ConfigError(
                f"fp8_head=true does not go with {given}", fix=f"remove fp8_head or {given}"
            )
        self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        settings = {"tokenizer": self.tokenizer, "train_tokenizer": self.train_tokenizer}
        given = [f"{name}={value}" for name, value in settings.items() if value]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are two tokenizers", fix="set one of them")
        if given and self.data == "shards":
            raise ConfigError(
                f"{given[0]} does not apply to data=shards, which are tokenized already",
                fix="remove it",
            )
        if given and self.level != "tokens":
            raise ConfigError(
                f"{given[0]} needs level=tokens", fix="add level=tokens, or remove the tokenizer"
            )
        if self.train_tokenizer and self.train_tokenizer < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"train_tokenizer must be at least {SMALLEST_VOCABULARY} "
                f"(all bytes and the end of text), got {self.train_tokenizer}",
                fix=f"set train_tokenizer={SMALLEST_VOCABULARY} or more",
            )


_LEAST = {
    "context_length": 1,
    "vocab_size": 0,
    "layers": 0,
    "heads": 0,
    "embedding_dim": 0,
    "train_tokenizer": 0,
}
_DEFAULTS = GptConfig()
_FROM_WEIGHTS = ("vocab_size", "context_length", "positions", "activation", "norm", "bias")


def shape_of(config: GptConfig) -> Shape:
    """Return the size of the model: the preset, and what the settings change of it."""
    preset = SHAPES[config.size]
    return Shape(
        config.layers or preset.layers,
        config.heads or preset.heads,
        config.embedding_dim or preset.embedding_dim,
    )


def design_of(config: GptConfig) -> Design:
    """Return the architecture that the settings describe."""
    shape = shape_of(config)
    width, heads = shape.embedding_dim, shape.heads
    if width % heads:
        nearest = max(1, round(width / heads)) * heads
        raise ConfigError(
            f"embedding_dim={width} is not a multiple of heads={heads}",
            fix=f"set embedding_dim={nearest}, or heads= to a divisor of {width}",
        )
    if config.positions == "rotary" and shape.head_dim % 2:
        raise ConfigError(
            f"positions=rotary needs an even head size, got {shape.head_dim}",
            fix="set embedding_dim to an even multiple of heads",
        )
    if not config.vocab_size:
        raise ConfigError(
            "the vocabulary size is unknown", fix="set vocab_size=, such as 256 for bytes"
        )
    names = (*_FROM_WEIGHTS, "dropout", "recompute", "fp8_head")
    return Design(shape, **{name: getattr(config, name) for name in names})


def load_initial_weights(config: GptConfig) -> tuple[GptConfig, dict[str, Tensor] | None]:
    """Return the settings as completed by the weights of `init_from`, and these weights.

    None without `init_from`.
    """
    if not config.init_from:
        return config, None
    design, weights = read_gpt2(Path(config.init_from))
    decided: dict[str, Any] = design.shape._asdict()
    for name in _FROM_WEIGHTS:
        decided[name] = getattr(design, name)
    if conflicts := _conflicts(config, design, decided):
        raise ConfigError(
            f"the weights in {config.init_from} belong to another model: {'; '.join(conflicts)}",
            fix="remove these settings: the weights decide them",
        )
    tokenizer = config.tokenizer or _tokenizer_beside_weights(config)
    return with_values(config, **decided, tokenizer=tokenizer), weights


def _conflicts(config: GptConfig, design: Design, decided: Mapping[str, Any]) -> list[str]:
    """Return the settings that the user changed to other values than those of the weights."""
    conflicts = []
    sizes = [name for name, shape in SHAPES.items() if shape == design.shape]
    if config.size not in {_DEFAULTS.size, *sizes}:
        conflicts.append(f"size={config.size}, not {design.shape}")
    for name, wanted in decided.items():
        value = getattr(config, name)
        if value not in {getattr(_DEFAULTS, name), wanted}:
            conflicts.append(f"{name}={value}, not {wanted}")
    return conflicts


def _tokenizer_beside_weights(config: GptConfig) -> str:
    place = Path(config.init_from)
    path = (place if place.is_dir() else place.parent) / TOKENIZER
    wanted = config.level == "tokens" and config.data == "text" and not config.train_tokenizer
    return str(path) if wanted and path.is_file() else ""


def with_vocabulary(config: GptConfig, vocabulary: Vocabulary | None) -> GptConfig:
    """Return the settings as completed by the text: vocabulary size, and what a token is."""
    if vocabulary is None:
        if not config.vocab_size:
            raise ConfigError(
                "the dataset does not store its vocabulary size",
                fix="set vocab_size=, such as 50257",
            )
        return config
    if config.level not in {_DEFAULTS.level, vocabulary.level}:
        raise ConfigError(
            f"level={config.level}, but the dataset stores {vocabulary.level}", fix="remove level="
        )
    size = vocabulary.size
    if config.init_from and config.vocab_size != size and vocabulary.level != "tokens":
        raise ConfigError(
            f"the weights in {config.init_from} have {config.vocab_size} tokens, "
            f"the text has {size} {vocabulary.level}",
            fix="add level=tokens and tokenizer=FILE, the tokenizer of these weights",
        )
    if config.vocab_size and config.vocab_size < size:
        raise ConfigError(
            f"vocab_size must be at least {size}, the {vocabulary.level} of the text, got {config.vocab_size}",
            fix=f"remove vocab_size=, or set it to {size} or more",
        )
    return with_values(config, vocab_size=config.vocab_size or size, level=vocabulary.level)
