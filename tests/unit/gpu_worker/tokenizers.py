"""Small tokenizers made on the spot, one for each way in which vocabularies spell text."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CORPUS = ["the quick brown fox", "ABC DEF GHI", "hello world and testing", "a b ab ba aab"] * 3


@functools.cache
def byte_level(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|end|>"],
        show_progress=False,
    )
    plain.train_from_iterator(CORPUS, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|end|>")
    made.chat_template = template
    return made


@functools.cache
def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Metaspace BPE with byte fallback, as Llama 2 and Mistral have it."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    letters = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,():\n"
    merges = [("▁", "t"), ("▁", "a"), ("▁a", "m"), ("i", "n"), ("in", "g"), ("D", "E"), ("DE", "F")]
    for piece in [*letters, *(a + b for a, b in merges)]:
        vocab.setdefault(piece, len(vocab))
    plain = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    plain.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    made.add_special_tokens({"additional_special_tokens": [AddedToken("[INST]", special=True)]})
    return made
