"""The wire protocol: every message, in the order in which a request meets them.

A message is a ZeroMQ multipart: an optional empty delimiter (a REQ socket sends one; it is answered in
kind), one **header** frame (a msgpack map with a ``type``, the only thing that the broker decodes) and
zero or more **body** frames (msgpack maps, opaque to the broker). `docs/protocol.md` says the same for
people who write a client in another language.

This file imports msgspec and the errors, nothing else. Field comments give units and bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from broker.errors import LoadOnceError, ProtocolError, from_validation, from_wire

VERSION: Final = 1

# Limits, enforced at the edge. `docs/protocol.md` lists them.
MAX_FRAME_BYTES: Final = 8 * 1024 * 1024  # ZMQ_MAXMSGSIZE; ZeroMQ drops the peer that sends more
MAX_HEADER_BYTES: Final = 256 * 1024
MAX_CLIENT_FRAMES: Final = 4096  # header + request + chunks already received
MAX_ID_CHARS: Final = 64
MAX_IDS: Final = 4096  # ids in one message
MAX_PREFIX_BLOCKS: Final = 128
MAX_STOP_STRINGS: Final = 16
MAX_TOP_LOGPROBS: Final = 20

BEAT_INTERVAL_S: Final = 1.0  # worker and client beats
LIVENESS_S: Final = 4.0  # silence after which a peer that beats is gone

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS, pattern=r"\A[!-~]+\Z")]
Ids = Annotated[list[Id], Meta(max_length=MAX_IDS)]
Name = Annotated[str, Meta(max_length=128)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Milliseconds = Annotated[int, Meta(ge=0, le=2**42)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Message(Struct, tag_field="type", omit_defaults=True):
    """Base of all headers: a map whose ``type`` names the message."""


# ── client → broker ──────────────────────────────────────────────────────────────────────────────


class Submit(Message, tag="submit"):
    """A request enters. Body: the `Request`, then any `Chunk`s that the client already has.

    Submitting an id again while it is in flight replaces it: the client has seen exactly the chunks that
    it sends along.
    """

    id: Id  # unique for this client; 128 random bits are a good choice
    model: Name = ""  # "" is the pool's default model
    stream: bool = False  # False: one message at the end, its chunks behind the final frame
    tenant: Name = ""  # fairness is between tenants
    priority: Annotated[int, Meta(ge=0, le=9)] = 5  # 0 is served first
    deadline_ms: Milliseconds = 0  # counted from arrival; 0 is the broker's default
    cost: Count = 1  # estimate, prompt tokens + tokens to generate
    prefix: Annotated[list[Count], Meta(max_length=MAX_PREFIX_BLOCKS)] = []  # chained block hashes
    version: int = VERSION


class Cancel(Message, tag="cancel"):
    """The client gives up a request. It ends in `Failed` with the code ``cancelled``."""

    id: Id


class Ping(Message, tag="ping"):
    """The client lives. One that has pinged once must go on, each `BEAT_INTERVAL_S`, while it waits."""

    pending: Ids = []  # what it waits for
    stamp: Count = 0  # comes back in the `Pong`
    version: int = VERSION


class ListModels(Message, tag="models"):
    """Which models are there? Answered by `Models`."""

    version: int = VERSION


ClientMessage = Submit | Cancel | Ping | ListModels


# ── broker → client ──────────────────────────────────────────────────────────────────────────────


class Chunks(Message, tag="chunk"):
    """New output. Body: one `Chunk` frame for each id. Also worker → broker, where `tokens` is filled."""

    ids: Ids
    tokens: list[Count] = []  # worker → broker only: tokens in each frame


class Done(Message, tag="done"):
    """The request ended well. Body: the `Outcome`, then all chunks if the submit did not stream.

    Also worker → broker, with the id alone.
    """

    id: Id
    worker: Name = ""
    attempts: Count = 0  # workers that began it
    queued_ms: Milliseconds = 0  # waited in the broker before the first of them


class Failed(Message, tag="error"):
    """The request ended in an error. Also worker → broker. Without an id: about the message itself."""

    code: str  # one of `broker.errors.BY_CODE`
    message: str
    id: str = ""
    param: str | None = None  # the request's field at fault
    retry_after_ms: Milliseconds | None = None

    @classmethod
    def of(cls, problem: LoadOnceError, id: str = "") -> Failed:
        """The message that carries `problem`."""
        return cls(problem.code, problem.message, id, problem.param, problem.retry_after_ms)

    def exception(self) -> LoadOnceError:
        """The exception that this message carries."""
        return from_wire(self.code, self.message, param=self.param, retry_after_ms=self.retry_after_ms)


class Pong(Message, tag="pong"):
    """Answer to `Ping`. Another `session` than before means a new broker: submit again what is pending."""

    session: Id
    unknown: Ids = []  # pending ids that the broker doesn't have: submit these again
    stamp: Count = 0  # of the ping: what was submitted after that ping isn't unknown
    version: int = VERSION


class ModelInfo(Struct, omit_defaults=True):
    """A model that a worker serves."""

    name: Name
    context: Count  # tokens, prompt and output together
    vocab: Count  # token ids are below this
    aliases: list[Name] = []
    chat: bool = True  # it has a chat template
    dtype: str = ""
    quantization: str = ""
    created: Count = 0  # seconds since the epoch
    workers: Count = 0  # broker → client: workers ready to serve it now


class Models(Message, tag="models"):
    """Answer to `ListModels`: every model that was ever served, in the order of first registration."""

    models: list[ModelInfo]
    session: Id
    version: int = VERSION


BrokerToClient = Chunks | Done | Failed | Pong | Models


# ── worker → broker ──────────────────────────────────────────────────────────────────────────────


class Ready(Message, tag="ready"):
    """A worker can serve. Answered by `BrokerBeat`, or by `Failed` if it isn't wanted."""

    name: Name  # unique in the pool, such as gpu0
    device: Name  # such as cuda:0, cpu
    host: Name
    pid: Count
    slots: Annotated[int, Meta(ge=1, le=4096)]  # requests that it takes at a time
    models: Annotated[list[ModelInfo], Meta(min_length=1, max_length=64)]
    session: str = ""  # the broker session that it knows; "" at first
    device_uuid: str = ""  # "" where there is none
    shared_device: bool = False  # another worker on the same device is fine
    version: int = VERSION


class WorkerBeat(Message, tag="beat"):
    """A worker lives. Counters only grow while the process lives."""

    session: str  # the broker session that it believes in
    running: Count = 0  # requests in hand
    kv_pages_used: Count = 0
    kv_pages_total: Count = 0
    steps: Count = 0  # model steps; standing still with work in hand means stalled
    prompt_tokens: Count = 0
    cached_tokens: Count = 0  # prompt tokens found in the prefix cache
    generated_tokens: Count = 0
    preemptions: Count = 0


class HandOff(Message, tag="handoff"):
    """The worker gives requests back unfinished; they go on elsewhere. Counts against nobody."""

    ids: Ids


class Leave(Message, tag="leave"):
    """The worker goes and has nothing in hand."""


WorkerMessage = Ready | WorkerBeat | Chunks | Done | Failed | HandOff | Leave


# ── broker → worker ──────────────────────────────────────────────────────────────────────────────


class Work(Message, tag="work"):
    """A request to run. Body: the `Request`, then the `Chunk`s that its client already has."""

    id: Id  # the broker's name for this attempt; answers carry it
    request_id: Id  # the client's name for the request, for the log


class CancelWork(Message, tag="cancel"):
    """Stop these; no answer is expected, and none is heard."""

    ids: Ids


class BrokerBeat(Message, tag="beat"):
    """The broker lives. Another `session` than before: drop all work and send `Ready` again."""

    session: Id


class Drain(Message, tag="drain"):
    """Take no new work, finish within the grace, hand back the rest, leave."""

    grace_ms: Milliseconds


BrokerToWorker = Work | CancelWork | BrokerBeat | Drain | Failed


# ── admin ↔ broker ───────────────────────────────────────────────────────────────────────────────


class AdminStatus(Message, tag="status"):
    """What is going on? Answered by `AdminReply` with a `Status` of `broker.status` as its body."""


class AdminMetrics(Message, tag="metrics"):
    """Counters and histograms, in Prometheus' text format, as the body of an `AdminReply`."""


class AdminDrain(Message, tag="drain"):
    """Give a worker no new work; it finishes what it has and, unless `exit` is set, stays."""

    worker: Name
    exit: bool = False
    grace_ms: Milliseconds = 30_000


class AdminResume(Message, tag="resume"):
    """Give a drained worker work again."""

    worker: Name


class AdminCancel(Message, tag="cancel"):
    """Cancel a request by its client's id."""

    id: Id


class AdminGone(Message, tag="gone"):
    """A process has exited (from supervisord's event listener): its worker is gone at once."""

    pid: Count
    worker: Name = ""


AdminMessage = AdminStatus | AdminMetrics | AdminDrain | AdminResume | AdminCancel | AdminGone


class AdminReply(Message, tag="reply"):
    """The command was carried out; what it says is in the body, if it says anything."""

    message: str = ""


AdminAnswer = AdminReply | Failed


# ── bodies: what the broker never decodes ────────────────────────────────────────────────────────


class TextPart(Struct, tag_field="type", tag="text"):
    """One part of a message's content."""

    text: str


class ChatMessage(Struct, omit_defaults=True):
    """One turn of a conversation, as the model's chat template wants it."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content as one string, parts joined in order."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Grammar(Struct, omit_defaults=True):
    """What the output must match."""

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    value: str = ""  # the schema as JSON text, the expression, the grammar


class Params(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """How to generate. None is the model's own default (its generation_config)."""

    max_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None  # None: up to the context's end
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None  # 0 is greedy
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None  # 0 and -1: no limit
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[
        list[tuple[int, Annotated[float, Meta(ge=-100, le=100)]]], Meta(max_length=4096)
    ] = []
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=16)] = []
    stop_token_ids: Annotated[list[int], Meta(max_length=256)] = []
    ignore_eos: bool = False
    seed: Int64 | None = None  # the client library and the frontend fill it in
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None  # alternatives per token
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False  # the prompt comes back as the first chunk
    grammar: Grammar | None = None
    include_stop: bool = False  # keep the matched stop string in the text
    skip_special_tokens: bool = True


class Request(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What to run: exactly one of `prompt`, `token_ids`, `messages`.

    `task` ``tokenize`` answers with one chunk of `token_ids`, ``detokenize`` with one of `text`.
    """

    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    params: Params = msgspec.field(default_factory=Params)
    task: Literal["generate", "tokenize", "detokenize"] = "generate"
    traceparent: str = ""


class TokenLogprob(Struct, omit_defaults=True):
    """Log-probability of one token and of its likeliest rivals, after temperature 1 softmax."""

    token_id: int
    token: str
    logprob: float
    bytes: list[int] = []  # UTF-8 of the token; "" can't show half a character
    top: list[TokenLogprob] = []  # most likely first; may hold the token itself


class Chunk(Struct, omit_defaults=True):
    """Output of one or more steps. Text may lag behind tokens (half characters, possible stop strings)."""

    start: int = 0  # how many tokens came before this chunk's
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[TokenLogprob] | None = None  # one for each token id
    prompt_token_ids: list[int] | None = None  # echo only, in the first chunk
    prompt_text: str | None = None  # echo only
    prompt_logprobs: list[TokenLogprob | None] | None = None  # one for each prompt token, None first


class Usage(Struct, omit_defaults=True):
    """Tokens counted by the worker that finished the request."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0  # of the prompt, from the prefix cache


class Outcome(Struct, omit_defaults=True):
    """How a request ended."""

    finish_reason: Literal["stop", "length"]
    usage: Usage
    stop_reason: str | int | None = None  # the stop string or token id that matched; None for EOS
    seed: int | None = None


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode  # a header or a body → bytes

from_client: Final = msgspec.msgpack.Decoder(ClientMessage)
to_client: Final = msgspec.msgpack.Decoder(BrokerToClient)
from_worker: Final = msgspec.msgpack.Decoder(WorkerMessage)
to_worker: Final = msgspec.msgpack.Decoder(BrokerToWorker)
from_admin: Final = msgspec.msgpack.Decoder(AdminMessage)
to_admin: Final = msgspec.msgpack.Decoder(AdminAnswer)
request_body: Final = msgspec.msgpack.Decoder(Request)
chunk_body: Final = msgspec.msgpack.Decoder(Chunk)
outcome_body: Final = msgspec.msgpack.Decoder(Outcome)

T = TypeVar("T")


def decode_header(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    """Decode one header frame.

    Raises:
        ProtocolError: it is too long, isn't msgpack, or isn't a message of that direction.
    """
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(frame)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise ProtocolError(f"bad header: {problem}") from None


def decode_request(frame: bytes) -> Request:
    """Decode a request body and check what its types can't say.

    Raises:
        InvalidRequest: names the field at fault.
    """
    try:
        request = request_body.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise from_validation(problem, within="params") from None
    return request


def split(frames: Sequence[bytes]) -> tuple[bool, bytes, Sequence[bytes]]:
    """Take a message apart: whether it began with an empty delimiter, its header, its bodies.

    Raises:
        ProtocolError: there is no header.
    """
    delimited = bool(frames) and not frames[0]
    rest = frames[1:] if delimited else frames
    if not rest:
        raise ProtocolError("a message needs a header frame")
    return delimited, rest[0], rest[1:]


def merge(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk that says what several said, in order.

    Raises:
        ValueError: there are none, or one doesn't begin where the one before it ended.
    """
    if not chunks:
        raise ValueError("no chunks to merge")
    whole = msgspec.structs.replace(chunks[0], token_ids=list(chunks[0].token_ids))
    text = [whole.text]
    for chunk in chunks[1:]:
        if chunk.start != whole.start + len(whole.token_ids):
            raise ValueError(f"chunk starts at {chunk.start}, {whole.start + len(whole.token_ids)} was due")
        whole.token_ids += chunk.token_ids
        text.append(chunk.text)
        if chunk.logprobs is not None:
            whole.logprobs = [*(whole.logprobs or []), *chunk.logprobs]
    whole.text = "".join(text)
    return whole
