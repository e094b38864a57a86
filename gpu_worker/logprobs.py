"""Log-probabilities as the wire wants them, with each token's text and bytes.

Knows nothing of requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch import Tensor

from broker.protocol import TokenLogprob

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The letters that byte-level vocabularies write for bytes: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


class TokenTexts:
    """The text and the bytes of single tokens, each worked out once.

    Args:
        tokenizer: a fast tokenizer; used in the calling thread only.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {id: added.content for id, added in tokenizer.added_tokens_decoder.items()}
        byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        self._alphabet = _byte_level_alphabet() if byte_level else {}
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __getitem__(self, token_id: int) -> tuple[str, list[int]]:
        """Text (half characters replaced) and bytes of a token; empty for an id without a token."""
        known = self._known.get(token_id)
        if known is None:
            spelled = self._bytes(token_id)
            known = self._known[token_id] = (spelled.decode("utf-8", "replace"), list(spelled))
        return known

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._alphabet and all(letter in self._alphabet for letter in token):
            return bytes(self._alphabet[letter] for letter in token)
        single = _BYTE_TOKEN.fullmatch(token)
        if single:
            return bytes([int(single[1], 16)])
        return str(token).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def report(
    texts: TokenTexts, token_id: int, logprob: float, top: Iterable[tuple[int, float]]
) -> TokenLogprob:
    """What the wire says of one token and its likeliest rivals."""
    rivals = []
    for rival, rival_logprob in top:
        text, spelled = texts[rival]
        rivals.append(TokenLogprob(rival, text, rival_logprob, spelled))
    text, spelled = texts[token_id]
    return TokenLogprob(token_id, text, logprob, spelled, rivals)


def of_prompt(texts: TokenTexts, logits: Tensor, next_ids: Sequence[int], rivals: int) -> list[TokenLogprob]:
    """Reports of prompt tokens, from the logits at the tokens before them.

    Args:
        texts: of the model's tokenizer.
        logits: float32 [tokens, vocab]; row i predicts ``next_ids[i]``. May have more rows.
        next_ids: the tokens that did come.
        rivals: how many alternatives to name.
    """
    if not next_ids:
        return []
    logprobs = logits[: len(next_ids)].log_softmax(-1)
    chosen = logprobs.gather(-1, logprobs.new_tensor(next_ids).long().unsqueeze(-1))[:, 0].tolist()
    if not rivals:
        return [report(texts, token, logprob, ()) for token, logprob in zip(next_ids, chosen, strict=True)]
    best = logprobs.topk(min(rivals, logprobs.shape[-1]))
    values, ids = best.values.tolist(), best.indices.tolist()
    return [
        report(texts, token, logprob, zip(row_ids, row_values, strict=True))
        for token, logprob, row_ids, row_values in zip(next_ids, chosen, ids, values, strict=True)
    ]
