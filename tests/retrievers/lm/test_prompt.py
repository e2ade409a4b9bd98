"""Blocks and codes: the paper's layout, whatever the text, with a small tokenizer that splits as Qwen's does."""

from __future__ import annotations

import base64
import importlib.util
import json
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from space_first import SPACE_FIRST, with_space_first
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from icr_bench.retrievers.lm.gguf import GPT2_SPLIT, QWEN_SPLIT
from icr_bench.retrievers.lm.prompt import (
    Block,
    Prompt,
    PromptSettings,
    Tokenizer,
    check_digits,
    clean,
    digits_for,
    draw_codes,
    text_keys,
    with_given,
)

quickly = settings(max_examples=60, deadline=None, database=None)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = [("D", "o"), ("Do", "c"), ("Ġ", "("), ("Ġ", "Doc"), ("l", "i"), ("k", "e"), (")", ":"), (":", ":"), ("Ġ", "Ġ")]

words = st.sampled_from([*"0123456789", " ", "\n", "(", ")", ":", "Doc", "Doc ", " (Doc 1234)", *SPECIAL, "\x00"])
letters = st.characters()  # lone surrogates among them
texts = st.lists(st.one_of(words, st.text(letters, max_size=6)), max_size=30).map("".join)


def serialize(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    split: str = QWEN_SPLIT,
    special: tuple[str, ...] = SPECIAL,
) -> str:
    """A byte-level BPE tokenizer in the form of tokenizer.json."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    pieces = pre_tokenizers.Split(tokenizers.Regex(split), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    told: str = tokenizer.to_str()
    return told


def small(merges: list[tuple[str, str]] = MERGES, **given: Any) -> str:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *dict.fromkeys("".join(pair) for pair in merges)]
    return serialize({token: number for number, token in enumerate(tokens)}, merges, **given)


SERIALIZED = small()
PLAIN = tokenizers.Tokenizer.from_str(SERIALIZED)
START, END = PLAIN.token_to_id("<|im_start|>"), PLAIN.token_to_id("<|im_end|>")


def qwen_like(**given: Any) -> Tokenizer:
    return Tokenizer(SERIALIZED, **{"bos": None, "eos": END, "name": "small", **given})


TOKENIZER = qwen_like()


def written(ids: list[int]) -> str:
    """What a block says, special tokens included."""
    told: str = PLAIN.decode(ids, skip_special_tokens=False)
    return told


def block(text: str, code: int = 1234, digits: int = 4, **given: Any) -> Block:
    (made,) = Prompt(TOKENIZER, PromptSettings(**given), digits).documents([text], [code])
    return made


def test_a_document_is_written_as_in_the_paper() -> None:
    made = block("like it or not")
    assert written(made.ids) == "<|im_start|>Doc 1234: like it or not (Doc 1234)<|im_end|>"
    assert (made.ids[0], made.ids[-1]) == (START, END)
    assert made.ids[made.text : made.after] == TOKENIZER.encode("like it or not")
    assert not made.truncated
    assert len(made) == len(made.ids)


def test_the_wrapper_takes_18_tokens_with_the_pieces_of_qwen() -> None:
    made = block("")
    assert (made.text, made.after, len(made)) == (9, 9, 18)
    assert Prompt(TOKENIZER, PromptSettings(), 4).wrapper == 18
    assert made.ids[1:9] == TOKENIZER.encode("Doc 1234: ")
    assert made.ids[9:17] == TOKENIZER.encode(" (Doc 1234)")
    tokens = [PLAIN.id_to_token(i) for i in made.ids]
    assert tokens[1:9] == ["Doc", "Ġ", "1", "2", "3", "4", ":", "Ġ"]
    assert tokens[9:17] == ["Ġ(", "Doc", "Ġ", "1", "2", "3", "4", ")"]


def test_every_code_has_the_same_wrapper() -> None:
    codes = [0, 7, 42, 999, 1000, 1111, 9999]
    blocks = list(Prompt(TOKENIZER, PromptSettings(), 4).documents(["like"] * len(codes), codes))
    assert {(len(made), made.text, made.after) for made in blocks} == {(20, 9, 11)}
    for code, made in zip(codes, blocks, strict=True):
        assert written(made.ids) == f"<|im_start|>Doc {code:04d}: like (Doc {code:04d})<|im_end|>"
        assert made.ids[made.text : made.after] == TOKENIZER.encode("like")


def test_more_digits_make_a_longer_wrapper() -> None:
    made = block("like", code=42, digits=6)
    assert written(made.ids) == "<|im_start|>Doc 000042: like (Doc 000042)<|im_end|>"
    assert Prompt(TOKENIZER, PromptSettings(), 6).wrapper == 22


def test_a_texts_tokens_do_not_join_the_wrappers() -> None:
    """Read as one text, ``:`` and ``:``, or two spaces, would be one token."""
    for text in (" like", ": x", "x ", " ", "12", "Doc ", "\n"):
        made = block(text)
        assert made.ids[made.text : made.after] == TOKENIZER.encode(text)
        assert (made.text, len(made) - made.after) == (9, 9)


def test_a_text_that_is_too_long_is_cut_and_told() -> None:
    prompt = Prompt(TOKENIZER, PromptSettings(cap=30), 4)
    assert prompt.text_tokens == 12
    blocks = list(prompt.documents(["x" * 12, "x" * 13, "y" * 5000], [1, 2, 3]))
    assert [len(made) for made in blocks] == [30, 30, 30]
    assert [made.truncated for made in blocks] == [False, True, True]
    assert written(blocks[1].ids) == f"<|im_start|>Doc 0002: {'x' * 12} (Doc 0002)<|im_end|>"


def test_a_cap_of_the_wrapper_alone_leaves_no_text() -> None:
    made = block("like", cap=18)
    assert written(made.ids) == "<|im_start|>Doc 1234:  (Doc 1234)<|im_end|>"
    assert made.truncated
    assert not block("", cap=18).truncated
    with pytest.raises(ValueError, match=r"18 tokens.*cap of 17"):
        Prompt(TOKENIZER, PromptSettings(cap=17), 4)


@pytest.mark.parametrize("given", [{"cap": 0}, {"offset": -1}])
def test_settings_out_of_range_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"got {given.get('cap', 300)} and {given.get('offset', 300)}"):
        PromptSettings(**given)


def test_settings_given_replace_those_of_the_weights() -> None:
    carried = PromptSettings(cap=200, offset=100, before="Q: ", after="\nA: ")
    assert with_given(carried, cap=50, offset=None, before="") == PromptSettings(50, 100, "", "\nA: ")


def test_many_documents_come_in_order() -> None:
    count = 600  # of several batches
    prompt = Prompt(TOKENIZER, PromptSettings(), 4)
    blocks = prompt.documents([f"text {i}" for i in range(count)], list(range(count)))
    for number, made in enumerate(blocks):
        assert written(made.ids) == f"<|im_start|>Doc {number:04d}: text {number} (Doc {number:04d})<|im_end|>"
    assert number == count - 1


def test_as_many_codes_as_texts_are_needed() -> None:
    with pytest.raises(ValueError, match="zip"):
        list(Prompt(TOKENIZER, PromptSettings(), 4).documents(["a", "b"], [1]))


def test_a_query_is_written_up_to_its_first_digit() -> None:
    made = Prompt(TOKENIZER, PromptSettings(before="Find: ", after="\nAnswer: "), 4).query("like\ud800 it?")
    assert written(made.ids) == "<|im_start|>Find: like\ufffd it?\nAnswer: Doc "
    assert made.ids[0] == START
    assert made.ids[made.text : made.after] == TOKENIZER.encode("like\ufffd it?")


def test_a_querys_digits_follow_the_tokens_that_a_documents_do() -> None:
    prompt = Prompt(TOKENIZER, PromptSettings(), 4)
    (document,) = prompt.documents(["like"], [1234])
    assert prompt.query("it").ids[-2:] == document.ids[1:3] == document.ids[document.after + 1 : document.after + 3]


def test_the_record_shows_where_blocks_start_and_end() -> None:
    prompt = Prompt(TOKENIZER, PromptSettings(), 4)
    shown = prompt.shown()
    assert shown["wrapper_tokens"] == 18
    assert written(shown["block_ids"]["first"]) == "<|im_start|>Doc 0000:"
    assert written(shown["block_ids"]["last"]) == "00)<|im_end|>"
    assert shown["query_ids"]["first"][0] == START
    assert written(shown["query_ids"]["last"]).endswith("Doc ")
    assert json.loads(json.dumps(shown)) == shown


@quickly
@example("")
@example("\ud800")
@example("<|im_end|>")
@example("\x00")
@example("日本語 Ελληνικά עברית 👩\u200d👩\u200d👧")
@given(texts)
def test_whatever_the_text_a_block_is_whole(text: str) -> None:
    prompt = Prompt(TOKENIZER, PromptSettings(cap=40), 4)
    (made,) = prompt.documents([text], [407])
    ids = TOKENIZER.encode(clean(text))
    assert len(made) <= 40
    assert made.truncated == (len(ids) > 22)
    assert made.ids[made.text : made.after] == ids[:22]
    assert made.ids[: made.text] == [START, *TOKENIZER.encode("Doc 0407: ")]
    assert made.ids[made.after :] == [*TOKENIZER.encode(" (Doc 0407)"), END]
    assert not {START, END, PLAIN.token_to_id("<|endoftext|>")} & set(made.ids[1:-1])
    assert written(ids) == clean(text)


@quickly
@given(texts)
def test_cleaning_keeps_length_and_all_that_can_be_encoded(text: str) -> None:
    cleaned = clean(text)
    assert len(cleaned) == len(text)
    cleaned.encode()
    for before, after in zip(text, cleaned, strict=True):
        assert after == ("\ufffd" if "\ud800" <= before <= "\udfff" else before)


@quickly
@given(st.lists(texts, max_size=5))
def test_encodings_of_a_batch_are_those_of_its_texts(batch: list[str]) -> None:
    encodings = TOKENIZER.encode_batch(batch)
    assert [encoding.ids for encoding in encodings] == [TOKENIZER.encode(clean(text)) for text in batch]
    for text, encoding in zip(batch, encodings, strict=True):
        assert all(0 <= start <= end <= len(text) for start, end in encoding.offsets)


@quickly
@given(texts)
def test_whatever_the_query_its_block_is_whole(text: str) -> None:
    made = Prompt(TOKENIZER, PromptSettings(), 4).query(text)
    assert written(made.ids) == f"<|im_start|>{PromptSettings().before}{clean(text)}{PromptSettings().after}Doc "
    assert made.ids[made.text : made.after] == TOKENIZER.encode(clean(text))


@pytest.mark.parametrize("text", ["x" * 200_000, "word " * 40_000, "\n" * 200_000, "😀" * 50_000, "7" * 50_000])
def test_a_very_long_text_is_cut(text: str) -> None:
    made = block(text)
    assert len(made) == 300
    assert made.truncated
    assert made.ids[made.text : made.after] == TOKENIZER.encode(text[:2000])[:282]


def test_special_tokens_within_a_text_are_text() -> None:
    for name in SPECIAL:
        made = block(f"a{name} b")
        assert len(made) - 18 == len(name) + 3
        assert written(made.ids) == f"<|im_start|>Doc 1234: a{name} b (Doc 1234)<|im_end|>"
        query = Prompt(TOKENIZER, PromptSettings(), 4).query(name)
        assert query.after - query.text == len(name)


def test_what_a_saved_tokenizer_adds_pads_or_cuts_is_not_done() -> None:
    saved = tokenizers.Tokenizer.from_str(SERIALIZED)
    saved.enable_truncation(4)
    saved.enable_padding(length=64, pad_id=0)
    saved.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", START), ("<|im_end|>", END)]
    )
    tokenizer = Tokenizer(saved.to_str(), None, END, "saved")
    text = "like it very much"
    assert tokenizer.encode(text) == TOKENIZER.encode(text)
    assert [x.ids for x in tokenizer.encode_batch([text, "a"])] == [TOKENIZER.encode(text), TOKENIZER.encode("a")]


def test_a_block_starts_with_bos_else_im_start_else_eos() -> None:
    begin = PLAIN.token_to_id("<|endoftext|>")
    both = qwen_like(bos=begin)
    assert (both.start, both.end) == (begin, END)
    assert (TOKENIZER.start, TOKENIZER.end) == (START, END)
    assert (qwen_like(bos=0).start, qwen_like(bos=0).end) == (0, END)  # an id of 0 is an id
    only = Tokenizer(small(special=("</s>",)), None, 265, "only")
    assert (only.start, only.end) == (265, 265)
    without = qwen_like(eos=None)
    assert (without.start, without.end) == (START, START)


def test_a_tokenizer_without_any_of_them_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokenizer nameless: has neither a bos, an <\|im_start\|> nor an eos"):
        Tokenizer(small(special=()), None, None, "nameless")


DIGIT_PAIRS = [(a, b) for a in "0123456789" for b in "0123456789"]


def test_a_tokenizer_that_merges_digits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokenizer merging: merges digits"):
        Tokenizer(small([*MERGES, *DIGIT_PAIRS], split=GPT2_SPLIT), None, END, "merging")
    kept = Tokenizer(small([*MERGES, *DIGIT_PAIRS]), None, END, "kept apart by the split")
    assert len(kept.encode("1234")) == 4


def test_a_tokenizer_that_merges_some_digits_is_refused() -> None:
    """A vocabulary learnt from text with years has 19 and 20 first."""
    serialized = small([*MERGES, ("1", "9"), ("2", "0")], split=GPT2_SPLIT)
    with pytest.raises(ValueError, match=r"tokenizer years: .*digit by digit"):
        Prompt(Tokenizer(serialized, None, END, "years"), PromptSettings(), 4)


@pytest.mark.parametrize(
    "digits",
    ["0", "0123456789", "1"],
)
def test_a_tokenizer_that_joins_digits_with_a_space_is_refused(digits: str) -> None:
    merges = [*MERGES, *(("Ġ", digit) for digit in digits)]
    with pytest.raises(ValueError, match=r"tokenizer spaced: .*digit by digit"):
        Prompt(Tokenizer(small(merges, split=GPT2_SPLIT), None, END, "spaced"), PromptSettings(), 4)


@pytest.mark.parametrize("form", SPACE_FIRST)
def test_a_tokenizer_that_puts_a_space_first_writes_the_same_blocks(form: str) -> None:
    """As Mistral-7B's and Llama 2's, in the forms that their files come in: no part of a block begins with one more."""
    serialized = with_space_first(form)
    plain = tokenizers.Tokenizer.from_str(serialized)
    assert len(plain.encode("1", add_special_tokens=False).ids) == 2, "this tokenizer says nothing"
    tokenizer = Tokenizer(serialized, 1, 2, form)
    assert [plain.id_to_token(token) for token in tokenizer.digits] == list("0123456789")
    prompt = Prompt(tokenizer, PromptSettings(before="Find: ", after="\nAnswer: "), 4)
    (made,) = prompt.documents(["Ada likes it"], [1234])
    assert prompt.wrapper == 18
    assert [plain.id_to_token(token) for token in made.ids] == [
        *("<s>", "Doc", "▁", "1", "2", "3", "4", ":", "▁"),
        *("A", "d", "a", "▁li", "k", "e", "s", "▁", "i", "t"),
        *("▁(", "Doc", "▁", "1", "2", "3", "4", ")", "</s>"),
    ]
    assert (made.text, made.after) == (9, 19)
    query = prompt.query("who?").ids
    assert plain.decode(query, skip_special_tokens=False) == "<s>Find: who?\nAnswer: Doc "
    assert query[-2:] == made.ids[1:3]
    assert prompt.query("").ids == [*prompt.opening, *query[-11:]]
    (encoding,) = tokenizer.encode_batch(["it likes"])
    assert encoding.offsets == [(0, 1), (1, 2), (2, 5), (5, 6), (6, 7), (7, 8)]


@pytest.mark.parametrize("form", SPACE_FIRST)
def test_a_saved_tokenizer_puts_no_space_first_either(form: str, tmp_path: Path) -> None:
    """It belongs to a model that was trained without."""
    Tokenizer(with_space_first(form), 1, 2, form).save(tmp_path)
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert saved.encode("Doc 1", add_special_tokens=False).tokens == ["Doc", "▁", "1"]


@pytest.mark.parametrize("form", SPACE_FIRST)
def test_a_space_first_that_joins_digits_is_refused(form: str) -> None:
    with pytest.raises(ValueError, match=r"tokenizer spaced: 'Doc 0000: ' is not .*digit by digit"):
        Prompt(Tokenizer(with_space_first(form, [("▁", "0")]), 1, 2, "spaced"), PromptSettings(), 4)


@pytest.fixture(scope="module")
def qwen() -> Tokenizer:
    """The vocabulary that Qwen2, Qwen2.5 and Qwen3 share, as the package dashscope carries it in tiktoken's form."""
    found = importlib.util.find_spec("dashscope")
    if found is None or not found.submodule_search_locations:
        pytest.skip("dashscope is not installed")
    file = Path(found.submodule_search_locations[0]) / "resources" / "qwen.tiktoken"
    if not file.is_file():
        pytest.skip("this dashscope carries no vocabulary")
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, file.read_text().splitlines())}
    alphabet = byte_letters()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    names = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = [tuple(names[part] for part in parts(token, ranks)) for token in ranks if len(token) > 1]
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    serialized = serialize(vocabulary, merges)  # type: ignore[arg-type]
    end = tokenizers.Tokenizer.from_str(serialized).token_to_id("<|im_end|>")
    assert end == 151645
    return Tokenizer(serialized, None, end, "Qwen")


def byte_letters() -> list[str]:
    """The letter by which byte-level BPE writes each byte, from its definition: printable bytes as they are."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def parts(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that tiktoken joins last to make a token."""
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        joined = [ranks.get(one + other, len(ranks)) for one, other in pairwise(pieces)]
        at = min(range(len(joined)), key=joined.__getitem__)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces[0], pieces[1]


@pytest.mark.slow
def test_qwens_wrapper_takes_18_tokens(qwen: Tokenizer) -> None:
    prompt = Prompt(qwen, PromptSettings(), 4)
    assert prompt.wrapper == 18
    assert qwen.start == 151644
    assert qwen.digits == list(range(15, 25))
    for text, code in (("The capital of France is Paris.", 1234), (" (Doc 99)", 0), ("<|im_end|>", 9999)):
        (made,) = prompt.documents([text], [code])
        assert made.ids[1 : made.text] == qwen.encode(f"Doc {code:04d}: ")
        assert made.ids[made.after : -1] == qwen.encode(f" (Doc {code:04d})")
        assert len(made) == 18 + len(qwen.encode(text))
    assert qwen.encode("The capital of France is Paris.") == [785, 6722, 315, 9625, 374, 12095, 13]


TEXTS = [f"document {i} says {random.Random(i).random()}" for i in range(2000)]


def test_codes_are_distinct_and_below_the_limit() -> None:
    codes = draw_codes(TEXTS, 4, 0)
    assert len(set(codes)) == len(TEXTS)
    assert all(0 <= code < 10_000 for code in codes)


def test_codes_follow_from_seed_and_text() -> None:
    assert draw_codes(TEXTS, 4, 0) == draw_codes(TEXTS, 4, 0)
    same = sum(a == b for a, b in zip(draw_codes(TEXTS, 4, 0), draw_codes(TEXTS, 4, 1), strict=True))
    assert same < 10


def test_codes_are_the_same_on_every_machine() -> None:
    """And in every process, however Python seeds its hashes."""
    assert draw_codes(["a", "b", "a", "", "日本語\ud800"], 4, 0) == [2129, 6644, 5824, 5077, 9801]


@settings(max_examples=30, deadline=None, database=None)
@given(st.lists(texts, min_size=1, max_size=10), st.integers(0, 5), st.randoms(use_true_random=False))
def test_the_order_of_documents_does_not_matter(batch: list[str], seed: int, chance: random.Random) -> None:
    codes = draw_codes(batch, 1, seed)  # few enough codes that most documents want a taken one
    order = chance.sample(range(len(batch)), len(batch))
    moved = draw_codes([batch[i] for i in order], 1, seed)
    assert Counter(zip(batch, codes, strict=True)) == Counter(zip([batch[i] for i in order], moved, strict=True))
    assert len(set(codes)) == len(codes)


def test_the_order_of_a_corpus_that_takes_all_codes_does_not_matter() -> None:
    texts = TEXTS[:100]
    codes = dict(zip(texts, draw_codes(texts, 2, 0), strict=True))
    shuffled = random.Random(0).sample(texts, 100)
    assert draw_codes(shuffled, 2, 0) == [codes[text] for text in shuffled]


def test_equal_texts_have_codes_of_their_own() -> None:
    codes = draw_codes(["same"] * 100, 2, 3)
    assert sorted(codes) == list(range(100))
    assert len(set(text_keys(["same", "other", "same"], 0))) == 3
    assert text_keys(["other", "same"], 0) == text_keys(["same", "other"], 0)[::-1]


@pytest.mark.parametrize(("count", "digits"), [(10_000, 4), (100, 2), (10, 1)])
def test_all_codes_can_be_taken(count: int, digits: int) -> None:
    codes = draw_codes([f"text {i}" for i in range(count)], digits, 0)
    assert sorted(codes) == list(range(count))


def test_codes_are_spread_evenly() -> None:
    """Chi-square over each digit, with bounds that a fixed seed makes certain."""
    codes = [f"{code:04d}" for code in draw_codes(TEXTS, 4, 0)]
    for place in range(4):
        counts = Counter(code[place] for code in codes)
        assert sum((counts[digit] - 200) ** 2 / 200 for digit in "0123456789") < 27.9  # exceeded once in 1000
    pairs = Counter(zip((c[0] for c in codes), (c[0] for c in codes[1:]), strict=False))
    assert max(pairs.values()) < 50  # neighbours have nothing to do with each other: 20 expected


def test_held_codes_are_kept_and_given_to_no_other() -> None:
    texts = TEXTS[:100]
    free = draw_codes(texts, 2, 0)
    held = {3: free[50], 50: free[3], 7: free[7]}
    codes = draw_codes(texts, 2, 0, held)
    assert {number: codes[number] for number in held} == held
    assert sorted(codes) == list(range(100))
    held = {0: 0}  # a code of 0 is a code
    assert draw_codes(texts, 2, 0, held)[0] == 0
    assert draw_codes(texts, 2, 0, dict(enumerate(free))) == free


def test_too_few_digits_are_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match="digits=1 make 10 codes, fewer than the 11 documents"):
        draw_codes(TEXTS[:11], 1, 0)
    with pytest.raises(ValueError, match="digits=4 make 10,000 codes, fewer than the 10,001 documents"):
        check_digits(10_001, 4)
    check_digits(10_000, 4)


def test_a_corpus_without_documents_has_no_codes() -> None:
    assert draw_codes([], 4, 0) == []
    assert list(Prompt(TOKENIZER, PromptSettings(), 4).documents([], [])) == []


@pytest.mark.parametrize(
    ("documents", "digits"),
    [(0, 4), (1, 4), (9999, 4), (10_000, 4), (10_001, 5), (100_000, 5), (100_001, 6), (10**6, 6)],
)
def test_digits_that_a_corpus_takes(documents: int, digits: int) -> None:
    assert digits_for(documents) == digits


def test_most_documents_keep_their_code_as_the_corpus_grows() -> None:
    before, after = draw_codes(TEXTS[:1000], 4, 0), draw_codes(TEXTS, 4, 0)
    kept = sum(a == b for a, b in zip(before, after[:1000], strict=True))
    assert kept > 900


def test_codes_of_lone_surrogates_and_nul_can_be_drawn() -> None:
    odd = ["\ud800", "\udfff", "\ufffd", "\x00", "", "\U0010ffff"]
    assert len(set(draw_codes(odd, 4, 0))) == len(odd)
    assert len(set(text_keys(odd, 0))) == len(odd)
    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in text_keys(odd, 0))
