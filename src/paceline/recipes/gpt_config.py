"""The settings of a GPT, and what follows from them: its design, once it is known what it starts from and what it reads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from paceline.config import BatchConfig, LrConfig, RunConfig
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
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(global_size=32, lanes=4))
    lr: LrConfig = field(
        default_factory=lambda: LrConfig(
            base=3e-3, reference_batch=32, schedule="cosine", warmup_samples=640, final=0.1
        )
    )
    size: Literal["nano", "mini", "124M", "350M", "774M", "1.5B"] = "nano"
    """How large the model is."""
    layers: int = 0
    """Blocks; 0: as many as the size has."""
    heads: int = 0
    """Heads of attention; 0: as many as the size has."""
    embedding_dim: int = 0
    """Numbers that stand for a token inside; 0: as many as the size has."""
    context_length: int = 128
    """Tokens of a row: how far back the model looks."""
    vocab_size: int = 0
    """How many different tokens the model has; 0: as many as the text."""
    positions: Literal["learned", "rotary"] = "learned"
    """How the model knows places: a vector for each, or queries and keys that are turned."""
    activation: Literal["gelu", "relu2"] = "gelu"
    """Between the two linear layers: GELU, or the square of the positive part."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm, or RMSNorm."""
    bias: bool = True
    """Whether linear layers and norms have biases."""
    dropout: float = 0.0
    """Share of numbers that are dropped."""
    recompute: bool = False
    """Compute each block again in backward instead of keeping what it computed: less memory, a third more work."""
    init_from: str = ""
    """Folder of GPT-2 weights in the Hugging Face layout to start from; it decides size, tokens and length."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon for the matrices of the blocks and AdamW for the rest."""
    weight_decay: float = 0.1
    """Decay of the weights of matrices; biases and norms have none."""
    data: Literal["text", "shards"] = "text"
    """Text in memory, or sets of shards that stream."""
    data_folder: str = ""
    """A file or folder of text, or the folder or address of the sets `train` and `test`; empty: Python's own modules."""
    windows: Literal["disjoint", "overlapping"] = "disjoint"
    """Rows of a text in memory follow each other, every twentieth is held out; any: they begin at every place of its first
    nine tenths, and the last tenth is held out."""
    level: Literal["bytes", "characters", "tokens"] = "bytes"
    """What a token of a text in memory is: a byte, a character, or a token of a tokenizer. Shards say it themselves."""
    tokenizer: str = ""
    """A tokenizer.json for level=tokens."""
    train_tokenizer: int = 0
    """Train a byte-level BPE tokenizer of so many tokens on the text, for level=tokens."""

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        super().__post_init__()
        for name, least in (
            ("context_length", 1),
            ("vocab_size", 0),
            ("layers", 0),
            ("heads", 0),
            ("embedding_dim", 0),
            ("train_tokenizer", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is too small",
                    fix=f"set {name} to {least} or more",
                )
        if self.windows == "overlapping" and self.data == "shards":
            raise ConfigError(
                "windows=overlapping is for text in memory: shards are rows already",
                fix="leave windows= out",
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                f"dropout={self.dropout} is no share", fix="set dropout to 0 or more, below 1"
            )
        self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        given = [
            f"{name}={getattr(self, name)}"
            for name in ("tokenizer", "train_tokenizer")
            if getattr(self, name)
        ]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are two tokenizers", fix="give one of them")
        if given and self.data == "shards":
            raise ConfigError(
                f"{given[0]}, but shards were made with a tokenizer", fix="leave it out"
            )
        if given and self.level != "tokens":
            raise ConfigError(
                f"{given[0]} needs level=tokens", fix="add level=tokens, or leave the tokenizer out"
            )
        if self.train_tokenizer and self.train_tokenizer < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"train_tokenizer={self.train_tokenizer} cannot hold every byte and the end of a text",
                fix=f"set train_tokenizer={SMALLEST_VOCABULARY} or more",
            )


_DEFAULTS = GptConfig()


def design_of(config: GptConfig) -> Design:
    """Return what the model is made of."""
    usual = SHAPES[config.size]
    shape = Shape(
        config.layers or usual.layers,
        config.heads or usual.heads,
        config.embedding_dim or usual.embedding_dim,
    )
    if shape.embedding_dim % shape.heads:
        near = max(1, round(shape.embedding_dim / shape.heads)) * shape.heads
        raise ConfigError(
            f"{shape.heads} heads cannot share a width of {shape.embedding_dim}",
            fix=f"set embedding_dim to a multiple of heads: embedding_dim={near}, or heads= to a divisor of {shape.embedding_dim}",
        )
    if config.positions == "rotary" and shape.embedding_dim // shape.heads % 2:
        raise ConfigError(
            f"positions=rotary turns pairs, but a head has {shape.embedding_dim // shape.heads} numbers",
            fix="set embedding_dim to an even multiple of heads",
        )
    if not config.vocab_size:
        raise ConfigError(
            "it is not known how many tokens there are",
            fix="set vocab_size=, such as 256 for bytes",
        )
    names = (
        "vocab_size",
        "context_length",
        "positions",
        "activation",
        "norm",
        "bias",
        "dropout",
        "recompute",
    )
    return Design(shape, **{name: getattr(config, name) for name in names})


def load_initial_weights(config: GptConfig) -> tuple[GptConfig, dict[str, Tensor] | None]:
    """Return the settings with all that the weights to start from decide, and these weights; None: new ones are drawn."""
    if not config.init_from:
        return config, None
    design, weights = read_gpt2(Path(config.init_from))
    names = ("vocab_size", "context_length", "positions", "activation", "norm", "bias")
    found: dict[str, Any] = design.shape._asdict() | {name: getattr(design, name) for name in names}
    said = {
        name: value
        for name in found
        if (value := getattr(config, name)) != getattr(_DEFAULTS, name)
    }
    other = [
        f"{name}={value}, not {found[name]}" for name, value in said.items() if value != found[name]
    ]
    if config.size not in {
        _DEFAULTS.size,
        *(name for name, shape in SHAPES.items() if shape == design.shape),
    }:
        other.insert(0, f"size={config.size}, not {design.shape}")
    if other:
        raise ConfigError(
            f"the weights in {config.init_from} are of another model: {'; '.join(other)}",
            fix="leave these settings out: the weights decide them",
        )
    return replace(config, **found, tokenizer=config.tokenizer or _tokenizer_of(config)), weights


def _tokenizer_of(config: GptConfig) -> str:
    """Return the tokenizer that lies beside the weights, if one is wanted and none is named."""
    place = Path(config.init_from)
    path = (place if place.is_dir() else place.parent) / TOKENIZER
    wanted = config.level == "tokens" and config.data == "text" and not config.train_tokenizer
    return str(path) if wanted and path.is_file() else ""


def with_vocabulary(config: GptConfig, vocabulary: Vocabulary | None) -> GptConfig:
    """Return the settings with all that the text decides: how many tokens there are, and what they are."""
    if vocabulary is None:
        if not config.vocab_size:
            raise ConfigError(
                "the set does not say how many tokens it has", fix="set vocab_size=, such as 50257"
            )
        return config
    if config.level not in {_DEFAULTS.level, vocabulary.level}:
        raise ConfigError(
            f"level={config.level}, but the set is of {vocabulary.level}", fix="leave level= out"
        )
    size = vocabulary.size
    if config.init_from and config.vocab_size != size and vocabulary.level != "tokens":
        raise ConfigError(
            f"the weights in {config.init_from} know {config.vocab_size} tokens, the text has {size} {vocabulary.level}",
            fix="add level=tokens and tokenizer=FILE, the tokenizer of these weights",
        )
    if config.vocab_size and config.vocab_size < size:
        raise ConfigError(
            f"vocab_size={config.vocab_size}, but the text has {size} different {vocabulary.level}",
            fix=f"leave vocab_size= out, or set it to {size} or more",
        )
    return replace(config, vocab_size=config.vocab_size or size, level=vocabulary.level)
