"""What the engine's tests put in the place of a model, so that its logic runs without one."""

from __future__ import annotations

import io
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from broker import protocol
from broker.errors import LoadOnceError
from broker.logs import Log
from gpu_worker.engine import Engine
from gpu_worker.exchange import EngineDied, Output, Run, StepOutput, Stop
from gpu_worker.loading import LoadedModel, SamplingDefaults
from gpu_worker.sampler import Sampled
from gpu_worker.scheduler import Row
from gpu_worker.sequence import Sequence as Generated
from gpu_worker.settings import WorkerSettings

EOS, END_OF_TURN = 256, 257
VOCAB = 258
CONTEXT = 128

NextToken = Callable[[Sequence[int]], int]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, so that text is easy to read; two special tokens; a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = _letters()
    vocab = {letter: byte_of[letter] for letter in alphabet}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    made.add_special_tokens({"additional_special_tokens": ["<end>"]})
    made.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert made.convert_tokens_to_ids(["<eos>", "<end>"]) == [EOS, END_OF_TURN]
    return made


def _letters() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def loaded(**changes: Any) -> LoadedModel:
    """A `LoadedModel` without a model."""
    fields: dict[str, Any] = {
        "model": None,
        "tokenizer": tokenizer(),
        "config": PretrainedConfig(),
        "name": "fake",
        "aliases": (),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "quantization": "none",
        "context": CONTEXT,
        "vocab": VOCAB,
        "eos_ids": frozenset({EOS}),
        "defaults": SamplingDefaults(),
        "weights_bytes": 0,
    }
    return LoadedModel(**{**fields, **changes})


def letters(tokens: Sequence[int]) -> int:
    """The next token of a model that writes small letters which depend on all that came before."""
    mixed = 17
    for token in tokens:
        mixed = (mixed * 31 + token) % 1_000_003
    return ord(string.ascii_lowercase[mixed % 26])


def saying(text: str, prompt_tokens: int) -> NextToken:
    """The next token of a model that writes `text` and EOS after a prompt of so many tokens."""
    script = [*text.encode(), EOS]
    return lambda tokens: script[len(tokens) - prompt_tokens]


class FakeRunner:
    """A model whose next token depends on what is in the *pages*: wrong paging gives wrong text.

    Args:
        next_token: from the tokens so far to the next one; may raise.
    """

    def __init__(self, next_token: NextToken = letters, *, pages: int = 64, page_tokens: int = 4) -> None:
        self.pages_total = pages
        self.page_tokens = page_tokens
        self.next_token = next_token
        self.faults: list[Exception] = []  # raised by the next forwards, first to last
        self.rows: list[list[tuple[str, int]]] = []  # of each forward that came through
        self._slots: dict[int, int] = {}

    def forward(self, rows: Sequence[Row]) -> Tensor:
        return self.forward_with_prompts(rows, [])[0]

    def forward_with_prompts(
        self, rows: Sequence[Row], every_token: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if self.faults:
            raise self.faults.pop(0)
        sampling, prompts = [], {}
        for number, row in enumerate(rows):
            seq, end = row.sequence, row.sequence.computed + row.tokens
            for position in range(seq.computed, end):
                self._slots[self._slot(seq, position)] = seq.token_ids[position]
            known = [self._slots[self._slot(seq, position)] for position in range(end)]
            if row.samples:
                sampling.append(_sure_of(self.next_token(known)))
            if number in every_token:
                lengths = range(seq.computed + 1, end + 1)
                prompts[number] = torch.stack([_sure_of(self.next_token(known[:n])) for n in lengths])
        self.rows.append([(row.sequence.id, row.tokens) for row in rows])
        return torch.stack(sampling) if sampling else torch.empty(0, VOCAB), prompts

    def _slot(self, seq: Generated, position: int) -> int:
        return seq.pages[position // self.page_tokens] * self.page_tokens + position % self.page_tokens


def _sure_of(token: int) -> Tensor:
    logits = torch.zeros(VOCAB)
    logits[token] = 20.0
    return logits


class FakeSampler:
    """Takes the likeliest token; a NaN is an error of its row."""

    def sample(self, logits: Tensor, sequences: list[Generated]) -> list[Sampled]:
        assert len(logits) == len(sequences)
        return [Sampled(int(row.argmax()), float(row.log_softmax(-1).max()), []) for row in logits]


class CheckedEngine(Engine):
    """Asserts the accounts of pages and sequences after every step."""

    def step(self) -> None:
        super().step()
        self._scheduler.check()


@dataclass
class Heard:
    """What was said of one request."""

    chunks: list[protocol.Chunk] = field(default_factory=list)
    outcome: protocol.Outcome | None = None
    error: LoadOnceError | None = None
    handed_back: bool = False

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def ended(self) -> bool:
        return self.outcome is not None or self.error is not None or self.handed_back


class Bench:
    """An engine that is driven step by step, and what it says.

    Args:
        runner: instead of the real one.
        sampler: instead of the real one; None is the real one.
        model: what the engine is told of the model.
        settings: changes to the default settings.
    """

    def __init__(
        self,
        runner: Any = None,
        *,
        sampler: Any = FakeSampler(),
        model: LoadedModel | None = None,
        **settings: Any,
    ) -> None:
        self.runner = cast(Any, runner or FakeRunner())
        self.log = io.StringIO()
        self.heard: dict[str, Heard] = {}
        self.stopped: dict[str, Heard] = {}
        self.died: EngineDied | None = None
        chosen = WorkerSettings(**{"page_tokens": self.runner.page_tokens, "slots": 8, **settings})
        self.engine = CheckedEngine(
            model or loaded(),
            chosen,
            self.runner,
            self.hear,
            Log("worker/test", stream=self.log),
            sampler=sampler,
        )

    def hear(self, output: Output) -> None:
        if isinstance(output, EngineDied):
            self.died = output
            return
        assert output, "the engine spoke without a word"
        self._hear_step(output)

    def _hear_step(self, output: StepOutput) -> None:
        for id, frame, tokens in output.chunks:
            chunk = protocol.chunk_body.decode(frame)
            assert len(chunk.token_ids) == tokens
            self._open(id).chunks.append(chunk)
        for id, frame in output.finished:
            self._open(id).outcome = protocol.outcome_body.decode(frame)
        for id, problem in output.failed:
            self._open(id).error = problem
        for id in output.handed_back:
            self._open(id).handed_back = True

    def _open(self, id: str) -> Heard:
        heard = self.heard.get(id) or self.stopped[id]
        assert not heard.ended, f"{id} goes on after its end"
        return heard

    def submit(
        self,
        prompt: str | list[int] | None = "hello",
        *,
        id: str = "a",
        chunks: Sequence[protocol.Chunk] = (),
        request: protocol.Request | None = None,
        **params: Any,
    ) -> Heard:
        """Put a request into the inbox."""
        if request is None:
            request = protocol.Request(
                prompt=prompt if isinstance(prompt, str) else None,
                token_ids=prompt if isinstance(prompt, list) else None,
                params=protocol.Params(**{"temperature": 0, "max_tokens": 8, **params}),
            )
        frames = tuple(protocol.encode(chunk) for chunk in chunks)
        self.engine.inbox.put(Run(id, f"request-{id}", protocol.encode(request), frames))
        self.heard[id] = Heard()
        return self.heard[id]

    def stop(self, *ids: str) -> None:
        """Cancel requests; they move from `heard` to `stopped`."""
        self.engine.inbox.put(Stop(ids))
        self.stopped |= {id: self.heard.pop(id) for id in ids if id in self.heard}

    def step(self) -> None:
        """What the engine's thread does in one round, without waiting for commands."""
        if self.engine.inbox.empty() and not len(self.engine._scheduler):
            return
        self.engine._receive()
        self.engine.step()

    def finish(self, steps: int = 2000) -> None:
        """Step until all requests have ended."""
        for _ in range(steps):
            if all(heard.ended for heard in self.heard.values()):
                return
            self.step()
        raise AssertionError(f"not ended: {[id for id, heard in self.heard.items() if not heard.ended]}")

    def ask(self, *args: Any, **kwargs: Any) -> Heard:
        """Submit one request and step until it has ended."""
        heard = self.submit(*args, **kwargs)
        self.finish()
        return heard
