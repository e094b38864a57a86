"""OpenAI's requests and responses as structs. Knows nothing of HTTP or the broker.

Every documented field is here: served, or listed in `CHAT_NOT_SERVED` and refused by name. A field that
is null counts as absent. `openapi.py` makes `/openapi.json` of these, so descriptions stand on the fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from broker.protocol import MAX_STOP_STRINGS, MAX_TOP_LOGPROBS

MAX_INT: Final = 2**31

Tokens = Annotated[int, Meta(ge=0, le=MAX_INT)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
ShortText = Annotated[str, Meta(max_length=512)]
Identifier = Annotated[str, Meta(pattern=r"\A[a-zA-Z0-9_-]{1,64}\Z")]
JSON: TypeAlias = Any  # any JSON value


# ── what chat and completions share ──────────────────────────────────────────────────────────────


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream carries beside its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Generation(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both OpenAI routes take. None is the model's default."""

    model: Annotated[str, Meta(max_length=128, description="empty or absent: the pool's default")] | None = (
        None
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=1024, description="choices; --max-n bounds it")] | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2, description="0 is greedy")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=4096, description="token id (as a string) → what is added to its logit"),
        ]
        | None
    ) = None
    user: ShortText | None = None
    # The field's common extensions.
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT, description="0 and -1: no limit")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_tokens: Tokens | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    guided_json: Annotated[JSON, Meta(description="a JSON schema the output must match")] = None
    guided_regex: Annotated[str, Meta(min_length=1, max_length=16384)] | None = None
    guided_choice: (
        Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)] | None
    ) = None
    guided_grammar: Annotated[str, Meta(min_length=1, max_length=262144, description="Lark")] | None = None
    priority: Annotated[int, Meta(ge=0, le=9, description="0 is served first")] | None = None


# ── POST /v1/chat/completions ────────────────────────────────────────────────────────────────────


class TextContent(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A part of a message's content."""

    text: str


class RefusalContent(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """What an assistant said when it declined, as clients send it back."""

    refusal: str


class CalledFunction(Struct, forbid_unknown_fields=True):
    """Which function with which arguments (JSON text)."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    arguments: str


class ToolCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """One call that the model made."""

    id: ShortText
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class InputMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn of the conversation. Fields of an assistant's answer may be sent back as they came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextContent | RefusalContent] | None = None
    name: ShortText | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    tool_call_id: ShortText | None = None
    refusal: str | None = None
    annotations: Annotated[list[JSON], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class FunctionSpec(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call."""

    name: Identifier
    description: str | None = None
    parameters: Annotated[dict[str, JSON], Meta(description="a JSON schema")] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionName(Struct, forbid_unknown_fields=True):
    """The name of one of the request's functions."""

    name: Identifier


class NamedTool(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """The one tool that the model must call."""

    function: FunctionName


class AllowedTools(Struct, tag_field="type", tag="allowed_tools"):
    """Some of the tools; read so that it can be refused by name."""


class CustomTool(Struct, tag_field="type", tag="custom"):
    """A tool that takes free text; read so that it can be refused by name."""


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Free text."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class SchemaSpec(Struct, forbid_unknown_fields=True):
    """A schema and its name."""

    name: Identifier
    schema: dict[str, JSON] | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that matches a schema."""

    json_schema: SchemaSpec


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class ChatRequest(Generation, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | CustomTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    metadata: Annotated[dict[str, ShortText], Meta(max_length=16)] | None = None
    service_tier: ShortText | None = None
    safety_identifier: ShortText | None = None
    store: bool | None = None
    modalities: list[ShortText] | None = None
    # Documented by OpenAI, not served here: see CHAT_NOT_SERVED.
    audio: JSON = None
    function_call: JSON = None
    functions: JSON = None
    moderation: JSON = None
    prediction: JSON = None
    prompt_cache_key: JSON = None
    prompt_cache_options: JSON = None
    prompt_cache_retention: JSON = None
    reasoning_effort: JSON = None
    verbosity: JSON = None
    web_search_options: JSON = None


CHAT_NOT_SERVED: Final = {
    "audio": "the models here write text",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "moderation": "there is no moderation here",
    "prediction": "predicted outputs aren't used here",
    "prompt_cache_key": "prefixes are cached by their content",
    "prompt_cache_options": "prefixes are cached by their content",
    "prompt_cache_retention": "prefixes are cached by their content",
    "reasoning_effort": "the models here take no such instruction",
    "verbosity": "the models here take no such instruction",
    "web_search_options": "nothing here searches the web",
}


class TopLogprob(Struct):
    """A likely token at one place."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(Struct):
    """A token of the answer, and its likeliest rivals."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities in the shape of chat completions."""

    content: list[TokenLogprobs] | None
    refusal: None = None


class AnswerMessage(Struct):
    """The assistant's turn."""

    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: None = None
    role: Literal["assistant"] = "assistant"


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Struct):
    """One of the n answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class CachedTokens(Struct):
    """How much of the prompt was in the prefix cache."""

    cached_tokens: int


class UsageCount(Struct):
    """Tokens of the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ChatResponse(Struct):
    """Answer of `POST /v1/chat/completions` without `stream`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageCount
    object: Literal["chat.completion"] = "chat.completion"
    service_tier: Literal["default"] | UnsetType = UNSET
    system_fingerprint: None = None


# ── POST /v1/completions ─────────────────────────────────────────────────────────────────────────

# str, list of str, list of token ids, list of lists of token ids; `validate.prompts` tells them apart.
Prompt = Annotated[
    str | list[str | int | list[int]],
    Meta(description="text, texts, token ids, or lists of token ids"),
]


class CompletionRequest(Generation, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    best_of: Annotated[int, Meta(ge=1, le=1024, description="only the value of n is served")] | None = None
    suffix: str | None = None


class CompletionLogprobs(Struct):
    """Log-probabilities in the shape of completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Struct):
    """One continuation; index counts prompts first, then n."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionResponse(Struct):
    """Answer of `POST /v1/completions` without `stream`."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageCount
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: None = None


# ── the other routes ─────────────────────────────────────────────────────────────────────────────


class ModelCard(Struct):
    """A model that can be asked for. `root` is another name of the same one."""

    id: str
    created: int
    context_length: int
    workers: int
    root: str
    quantization: str
    dtype: str
    object: Literal["model"] = "model"
    owned_by: str = "loadonce"


class ModelList(Struct):
    """Answer of `GET /v1/models`."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class ErrorBody(Struct):
    """What went wrong, in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct):
    """Every error of every route but `POST /generation`."""

    error: ErrorBody
