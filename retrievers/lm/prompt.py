"""Documents and queries as token blocks, and the codes that name documents (BlockSearch, sections 3.1 and 3.2)."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.processors

DIGITS = 4
"""Digits of a code for up to 10,000 documents; more documents take more digits."""


class Tokenizer:
    """Text to token ids, without special tokens added or recognised in text, and the ids that wrap a block. No space is
    put first either, as Mistral's and Llama 2's do: the parts of a block are tokenised apart, and each would have one.

    Args:
        serialized: a ``tokenizer.json`` as text.
        bos, eos: ids of the begin and end tokens, where the model has them.
        name: for messages and records.

    Raises:
        ValueError: a digit is no single token, or there is no token to start and end a block with.
    """

    def __init__(self, serialized: str, bos: int | None, eos: int | None, name: str) -> None:
        self.name = name
        told = json.loads(serialized)
        told |= {part: _no_space_first(told.get(part)) for part in ("normalizer", "pre_tokenizer")}
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(told))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # "<|im_end|>" in a document is text, not the end of its block
        start = next((t for t in (bos, self._tokenizer.token_to_id("<|im_start|>"), eos) if t is not None), None)
        if start is None:
            raise ValueError(f"tokenizer {name}: has neither a bos, an <|im_start|> nor an eos token to start a block")
        self.start, self.end = start, eos if eos is not None else start
        digits = [self.encode(str(digit)) for digit in range(10)]
        for one, other in itertools.product(range(10), repeat=2):
            pair = f"{one}{other}"
            joined = self.encode(pair)
            if len(digits[one]) != 1 or joined != digits[one] + digits[other]:
                what = "merges digits" if len(joined) < 2 else "does not keep digits as tokens of their own"
                raise ValueError(
                    f"tokenizer {name}: {what} ({pair} is {len(joined)} token(s)), "
                    "so that a code cannot be decoded digit by digit; use a model whose digits are single tokens"
                )
        self.digits = [digit[0] for digit in digits]

    def save(self, folder: Path, *, ended: bool = False) -> None:
        """Write the files of a tokenizer as transformers reads them.

        Args:
            ended: whether others that load it end every text with the end token.
        """
        token = self._tokenizer.id_to_token
        written = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        if ended:
            end = token(self.end)
            written.post_processor = tokenizers.processors.TemplateProcessing(
                single=f"$A {end}", special_tokens=[(end, self.end)]
            )
        written.save(str(folder / "tokenizer.json"))
        ends = {"bos_token": token(self.start), "eos_token": token(self.end), "pad_token": token(self.end)}
        told = {"tokenizer_class": "PreTrainedTokenizerFast", **ends}
        (folder / "tokenizer_config.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Any]:
        """Encodings (``ids``, ``offsets``) of texts; a lone surrogate counts as U+FFFD."""
        return self._tokenizer.encode_batch([clean(text) for text in texts], add_special_tokens=False)


def _no_space_first(part: Any) -> Any:
    """A normalizer or pre-tokenizer of a tokenizer.json, or several, without what puts a space before a text."""
    if isinstance(part, list):
        return [_no_space_first(one) for one in part if one["type"] != "Prepend"]
    if part is None or part["type"] == "Prepend":
        return None
    inner = {key: _no_space_first(part[key]) for key in ("normalizers", "pretokenizers") if key in part}
    never = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}
    return part | inner | never.get(part["type"], {})


def clean(text: str) -> str:
    """The text with every lone surrogate replaced, which no tokenizer can encode; its length is kept."""
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


@dataclass(frozen=True)
class PromptSettings:
    """How blocks are written; weights may carry their own.

    A document is ``<bos>Doc {code}: {text} (Doc {code})<eos>`` and a query ``<bos>{before}{query}{after}Doc ``,
    followed by the digits of the answer. The paper's wording of the query block is not public; what is known is an
    instruction, the query and ``Answer:``. The answer starts with the tokens of ``Doc ``, as a document's code does,
    so that its digits follow what they follow there.
    """

    cap: int = 300  # tokens of a document's block, at most
    offset: int = 300  # position of a query's first token; documents start at 0
    before: str = "Find the document that answers this query: "
    after: str = "\nAnswer: "

    def __post_init__(self) -> None:
        if self.cap < 1 or self.offset < 0:
            raise ValueError(f"cap must be 1 or more and offset 0 or more, got {self.cap} and {self.offset}")


@dataclass(frozen=True)
class Block:
    """A document or query as token ids, of which ``text`` to ``after`` come from its own text."""

    ids: list[int]
    text: int
    after: int
    truncated: bool = False

    def __len__(self) -> int:
        return len(self.ids)


class Prompt:
    """Writes blocks. Prefix, text and suffix are tokenised apart, so that a text's tokens do not depend on its code
    and the wrapper always has the same length (18 tokens with Qwen's vocabulary, as the paper counts).

    Raises:
        ValueError: the wrapper alone exceeds the cap.
    """

    def __init__(self, tokenizer: Tokenizer, settings: PromptSettings, digits: int) -> None:
        self.tokenizer, self.settings, self.digits = tokenizer, settings, digits
        self._doc, self._colon = tokenizer.encode("Doc "), self._rest("Doc ", ": ")
        self._open, self._close = tokenizer.encode(" (Doc "), self._rest(" (Doc ", ")")
        self._before, self._after = tokenizer.encode(settings.before), [*tokenizer.encode(settings.after), *self._doc]
        self.wrapper = 2 + 2 * digits + sum(map(len, (self._doc, self._colon, self._open, self._close)))
        if self.wrapper > settings.cap:
            raise ValueError(f"a block's wrapper takes {self.wrapper} tokens, more than the cap of {settings.cap}")

    def _rest(self, head: str, tail: str) -> list[int]:
        """The tokens after the code's digits, which are the same after any code."""
        start, rests = self.tokenizer.encode(head), list[list[int]]()
        for digit, token in enumerate(self.tokenizer.digits):
            code = f"{digit}" * self.digits
            ids = self.tokenizer.encode(head + code + tail)
            rests.append(ids[len(start) + self.digits :])
            if ids[: len(start) + self.digits] != start + [token] * self.digits or rests[-1] != rests[0]:
                raise ValueError(
                    f"tokenizer {self.tokenizer.name}: {head + code + tail!r} is not {head!r}, {self.digits} digits "
                    f"and {tail!r}, so that no code can be decoded digit by digit; use a model that keeps digits apart"
                )
        return rests[0]

    @property
    def code_at(self) -> int:
        """Place of the code's first digit in a document's block."""
        return 1 + len(self._doc)

    @property
    def text_tokens(self) -> int:
        """Tokens of a text that fit into a block."""
        return self.settings.cap - self.wrapper

    def code(self, number: int) -> list[int]:
        """The token ids of a code's digits."""
        return [self.tokenizer.digits[int(digit)] for digit in f"{number:0{self.digits}d}"]

    def documents(self, texts: Sequence[str], codes: Sequence[int]) -> Iterator[Block]:
        """The blocks of documents, in order."""
        tokenizer = self.tokenizer
        for begin in range(0, len(texts), 256):
            batch = tokenizer.encode_batch(texts[begin : begin + 256])
            for encoding, number in zip(batch, codes[begin : begin + 256], strict=True):
                code, ids = self.code(number), encoding.ids[: self.text_tokens]
                head = [tokenizer.start, *self._doc, *code, *self._colon]
                tail = [*self._open, *code, *self._close, tokenizer.end]
                truncated = len(encoding.ids) > self.text_tokens
                yield Block(head + ids + tail, len(head), len(head) + len(ids), truncated)

    def query(self, text: str) -> Block:
        """The block of a query, up to and without the first digit of the answer."""
        ids = self.tokenizer.encode(clean(text))
        head = [self.tokenizer.start, *self._before]
        return Block([*head, *ids, *self._after], len(head), len(head) + len(ids))

    @property
    def opening(self) -> list[int]:
        """The tokens that every query begins with."""
        return [self.tokenizer.start, *self._before]

    def shown(self) -> dict[str, Any]:
        """First and last token ids of a block and a query, for the record: a doubled or missing bos shows there."""
        block = next(self.documents(["text"], [0])).ids
        query = self.query("text").ids
        return {
            "wrapper_tokens": self.wrapper,
            "block_ids": {"first": block[:8], "last": block[-4:]},
            "query_ids": {"first": query[:8], "last": query[-4:]},
        }


def digits_for(documents: int) -> int:
    """Digits that a corpus of this size takes."""
    return max(DIGITS, len(str(documents - 1)))


def draw_codes(texts: Sequence[str], digits: int, seed: int, held: Mapping[int, int] | None = None) -> list[int]:
    """Distinct random codes below ``10 ** digits``, one a document.

    A document's code follows from the seed and its text, not from its place: each text has a random sequence of codes
    and takes the first one that is free, in an order given by the texts themselves. So the order of a corpus does not
    matter, and most documents keep their code as the corpus grows.

    Args:
        held: documents (by number) that have a code already and keep it.

    Raises:
        ValueError: fewer codes than documents.
    """
    held = held or {}
    limit = 10**digits
    check_digits(len(texts), digits)
    codes, taken = [held.get(number, -1) for number in range(len(texts))], set(held.values())
    for key, number in sorted((key, number) for number, key in enumerate(text_keys(texts, seed))):
        if codes[number] < 0:
            codes[number] = next(code for code in _sequence(bytes.fromhex(key), limit) if code not in taken)
            taken.add(codes[number])
    return codes


def check_digits(documents: int, digits: int) -> None:
    if documents > 10**digits:
        raise ValueError(f"digits={digits} make {10**digits:,} codes, fewer than the {documents:,} documents")


def text_keys(texts: Sequence[str], seed: int) -> list[str]:
    """What identifies each document under this seed; equal texts are told apart by counting them."""
    repeats: dict[str, int] = {}
    keys = []
    for text in texts:
        repeats[text] = repeats.get(text, 0) + 1
        told = f"icr-bench code {seed} {repeats[text]} ".encode() + text.encode("utf-8", "surrogatepass")
        keys.append(hashlib.sha256(told).hexdigest())
    return keys


def _sequence(key: bytes, limit: int) -> Iterator[int]:
    """Endless pseudo-random codes below ``limit``; of 8 bytes each, so that the modulus favours none."""
    while True:
        for at in range(0, len(key), 8):
            yield int.from_bytes(key[at : at + 8]) % limit
        key = hashlib.sha256(key).digest()


def with_given(settings: PromptSettings, **given: Any) -> PromptSettings:
    """Settings with what was given in place of what the weights carry."""
    return replace(settings, **{name: value for name, value in given.items() if value is not None})
