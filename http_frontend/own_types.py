"""The requests and responses of our own routes as structs; the rules of `openai_types.py` hold here too."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from broker.protocol import MAX_STOP_STRINGS
from http_frontend.openai_types import JSON, MAX_INT, InputMessage, StopText, Tokens, Tool

# ── POST /generation ─────────────────────────────────────────────────────────────────────────────


class GenParams(Struct, forbid_unknown_fields=True, kw_only=True):
    """transformers' names for how to generate. None is the model's default."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    min_new_tokens: Tokens | None = None
    do_sample: Annotated[bool, Meta(description="false is greedy")] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    num_return_sequences: Annotated[int, Meta(ge=1, le=1024)] | None = None
    stop_strings: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    eos_token_id: int | Annotated[list[int], Meta(max_length=256)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    return_full_text: bool | None = None
    skip_special_tokens: bool | None = None
    # Served only where they say nothing new: see validate_generation.HARMLESS.
    num_beams: int | None = None
    num_beam_groups: int | None = None
    no_repeat_ngram_size: int | None = None
    typical_p: float | None = None
    length_penalty: float | None = None
    diversity_penalty: float | None = None
    early_stopping: bool | None = None
    use_cache: bool | None = None
    pad_token_id: int | None = None
    clean_up_tokenization_spaces: bool | None = None
    return_dict_in_generate: bool | None = None
    return_tensors: bool | None = None
    return_text: bool | None = None
    # Not served here, whatever they say: see validate_generation.NOT_SERVED.
    max_length: JSON = None
    min_length: JSON = None
    bad_words_ids: JSON = None
    force_words_ids: JSON = None
    penalty_alpha: JSON = None
    max_time: JSON = None
    prefix: JSON = None
    handle_long_generation: JSON = None


class GenerationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /generation`."""

    prompt: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
    )
    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    gen_params: GenParams | None = None
    return_full_text: bool | None = None
    model: Annotated[str, Meta(max_length=128)] | None = None


class GeneratedText(Struct):
    """One continuation, with its prompt unless `return_full_text` is false."""

    generated_text: str


class GenerationResponse(Struct):
    """Answer of `POST /generation`."""

    data: list[GeneratedText]
    code: Literal[0] = 0


class GenerationError(Struct):
    """An error of `POST /generation`: `code` is the HTTP status, never 0."""

    code: Annotated[int, Meta(ge=400, le=599)]
    message: str
    param: str | None = None
    error: str = ""


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /tokenize`: `prompt` or `messages`."""

    model: Annotated[str, Meta(max_length=128)] | None = None
    prompt: str | None = None
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    add_generation_prompt: bool | None = None


class TokenizeResponse(Struct):
    """Answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: Annotated[str, Meta(max_length=128)] | None = None


class DetokenizeResponse(Struct):
    """Answer of `POST /detokenize`."""

    prompt: str


class Health(Struct):
    """Answer of `GET /health` and `GET /ready`."""

    status: Literal["ok", "ready", "draining", "no worker"]
    models: list[str] = field(default_factory=list)
