"""Speed and memory of the language-model engine, as ratios within one run: ``python tests/perf/engine.py --help``.

Keys and values are random where only the time of reading them counts; documents and queries are those of a BEIR
folder. Every comparison alternates between its two sides and takes the fastest try of each, since machines are shared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tabulate import tabulate

from icr_bench.retrievers.base import Document
from icr_bench.retrievers.blocksearch import ROUTING_LAYER, BlockSearch
from icr_bench.retrievers.lm import attend
from icr_bench.retrievers.lm.backbone import Backbone, load_backbone, same_fraction
from icr_bench.retrievers.lm.cache import CorpusCache, Shard, prefill
from icr_bench.retrievers.lm.decode import Beam, Codes, search
from icr_bench.retrievers.lm.engine import Config, Engine, Routing
from icr_bench.retrievers.lm.prompt import Block, Prompt, PromptSettings, Tokenizer, digits_for, draw_codes

Row = tuple[str, str, str, str]
ROWS = ("prefill", "attention", "batch", "routing", "memory")


def fastest(*works: Callable[[], object], tries: int = 3) -> list[float]:
    """Seconds of the fastest try of each, tried in turn."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(tries):
        for work, own in zip(works, taken, strict=True):
            start = time.perf_counter()
            work()
            own.append(time.perf_counter() - start)
    return [min(own) for own in taken]


def texts_of(data: Path, count: int) -> list[str]:
    """The first documents of a BEIR folder, title and text; repeated where it has fewer."""
    documents = []
    with (data / "corpus.jsonl").open(encoding="utf-8") as stream:
        for line in stream:
            entry = json.loads(line)
            documents.append(f"{entry.get('title') or ''} {entry['text']}".strip())
            if len(documents) == count:
                return documents
    return [documents[i % len(documents)] for i in range(count)]


def queries_of(data: Path, count: int) -> list[str]:
    with (data / "queries.jsonl").open(encoding="utf-8") as stream:
        return [json.loads(line)["text"] for line, _ in zip(stream, range(count), strict=False)]


def tiny(tokenizer: Tokenizer, vocabulary: int) -> Backbone:
    """The shape of the tiny models: 6 layers, width 128, 4 heads of 32, random weights."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Backbone(config).requires_grad_(False).eval()


def random_cache(backbone: Backbone, blocks: Sequence[Block], codes: Sequence[int], shard_tokens: int) -> CorpusCache:
    """A cache of these documents with random keys and values."""
    shards, begin = [], 0
    while begin < len(blocks):
        end, tokens = begin, 0
        while end < len(blocks) and (end == begin or tokens + len(blocks[end]) <= shard_tokens):
            tokens += len(blocks[end])
            end += 1
        ends = torch.tensor([len(block) for block in blocks[begin:end]]).cumsum(0)
        starts = ends - torch.tensor([len(block) for block in blocks[begin:end]])
        texts = [torch.tensor([getattr(b, name) for b in blocks[begin:end]]) + starts for name in ("text", "after")]
        shape = (backbone.depth, backbone.kv_heads, tokens, backbone.head_dim)
        keys, values = (torch.randn(shape, dtype=backbone.dtype) for _ in range(2))
        shards.append(Shard(keys, values, torch.arange(begin, end), starts, ends, *texts))
        begin = end
    return CorpusCache(shards, codes, digits_for(len(codes)))


def prefill_row(backbone: Backbone, prompt: Prompt, texts: Sequence[str]) -> list[Row]:
    from transformers import AutoModel

    model = AutoModel.from_config(backbone.config, dtype=backbone.dtype).eval()
    parameters = {name: value for name, value in backbone.state_dict().items() if not name.startswith("lm_head")}
    model.load_state_dict(parameters)
    blocks = list(prompt.documents(texts, draw_codes(texts, 4, 0)))
    tokens = sum(map(len, blocks))

    @torch.inference_mode()
    def theirs() -> None:
        for begin in range(0, len(blocks), 16):
            batch = blocks[begin : begin + 16]
            longest = max(map(len, batch))
            ids = torch.tensor([block.ids + [0] * (longest - len(block)) for block in batch])
            mask = torch.tensor([[1] * len(block) + [0] * (longest - len(block)) for block in batch])
            model(input_ids=ids, attention_mask=mask, use_cache=True)

    @torch.inference_mode()
    def products() -> None:
        layer = backbone.stack()[0]
        x = torch.randn(1024, backbone.config.hidden_size, dtype=backbone.dtype)
        z = torch.randn(1024, backbone.config.intermediate_size, dtype=backbone.dtype)
        heads = torch.randn(1024, backbone.heads * backbone.head_dim, dtype=backbone.dtype)
        attention, mlp = layer.self_attn, layer.mlp
        for _ in range(backbone.depth):
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                projection(x)
            attention.o_proj(heads)
            mlp.down_proj(z)

    ours, hugging, bound = fastest(lambda: list(prefill(backbone, blocks, range(len(blocks)))), theirs, products)
    bound *= tokens / 1024
    return [
        (
            "prefill",
            f"{len(blocks)} documents, {tokens:,} tokens",
            f"{hugging / ours:.2f}x Hugging Face in padded batches of 16",
            f"matrix products alone: {hugging / bound:.2f}x, so this is {bound / ours:.0%} of their bound",
        )
    ]


def attention_row(backbone: Backbone, tokens: int) -> list[Row]:
    """One query row of every head over a cache larger than any processor's own memory."""
    layers = max(1, (1 << 30) // (tokens * backbone.token_bytes() // backbone.depth))
    shape = (layers, backbone.kv_heads, tokens, backbone.head_dim)
    keys, values = (torch.randn(shape, dtype=backbone.dtype) for _ in range(2))
    q = torch.randn(backbone.kv_heads, backbone.heads // backbone.kv_heads, backbone.head_dim)
    stream = torch.randn(1 << 28)

    def ours() -> None:
        for layer in range(layers):
            attend.attend(q, keys[layer], values[layer])

    def plain() -> None:
        for layer in range(layers):
            attend.attend_plain(q, keys[layer], values[layer])

    reading, mine, reference = fastest(stream.sum, ours, plain, tries=5)
    bandwidth, used = stream.nbytes / reading, (keys.nbytes + values.nbytes) / mine
    kernel = attend.kernel_name(backbone.head_dim, backbone.dtype, "cpu")
    return [
        (
            "corpus attention",
            f"greedy, one query, {tokens:,} tokens, {backbone.heads // backbone.kv_heads} rows a head, {kernel}",
            f"{used / bandwidth:.0%} of the read bandwidth",
            f"the plain form takes {reference / mine:.1f} times as long",
        )
    ]


def speed(backbone: Backbone, rows: int, tokens: int) -> float:
    """Share of the speed of a large matrix product at which query rows attend to one layer, arithmetic alone."""
    keys, values = (torch.randn(backbone.kv_heads, tokens, backbone.head_dim, dtype=backbone.dtype) for _ in range(2))
    q = torch.randn(backbone.kv_heads, rows * backbone.heads // backbone.kv_heads, backbone.head_dim)
    square = torch.randn(2048, 2048, dtype=backbone.dtype)
    attended, product = fastest(lambda: attend.attend(q, keys, values), lambda: square @ square)
    return 4 * rows * backbone.heads * tokens * backbone.head_dim / attended / (2 * 2048**3 / product)


def batch_row(backbone: Backbone, prompt: Prompt, cache: CorpusCache, queries: Sequence[Block]) -> list[Row]:
    engine, codes = Engine(backbone, Config(), 300), Codes(cache.codes, cache.digits, backbone.device)
    digits = prompt.tokenizer.digits
    rows = []
    for name, beam in (("beam 25", Beam()), ("greedy", Beam(1, 1))):

        def ask(blocks: Sequence[Block], beam: Beam = beam) -> None:
            search(engine, cache, codes, engine.query_pass(cache, blocks), digits, beam)

        together, single = fastest(lambda: ask(queries), lambda: [ask([block]) for block in queries], tries=2)
        what = f"{len(queries)} queries, {name}, N={len(cache):,}"
        alone, all_rows = (speed(backbone, beam.width * count, cache.shards[0].tokens) for count in (1, len(queries)))
        rows.append(
            (
                "queries at once",
                what,
                f"{single / together:.2f}x the throughput of single ones",
                f"a digit's attention: {alone:.0%} of the speed of a matrix product alone, {all_rows:.0%} together",
            )
        )
    return rows


def routing_row(
    name: str, backbone: Backbone, prompt: Prompt, texts: Sequence[str], queries: Sequence[Block], sizes: Sequence[int]
) -> list[Row]:
    middle = same_fraction(*ROUTING_LAYER, backbone.depth)
    configs = {
        "dense": Config(),
        "routed": Config(routing=Routing(middle, 256)),
        "upper": Config(routing=Routing(middle, 256, reach="upper")),
    }
    rows, taken = [], {}
    for n in sizes:
        codes = draw_codes(texts[:n], 4, 0)
        cache = random_cache(backbone, list(prompt.documents(texts[:n], codes)), codes, 100_000)
        tree = Codes(codes, 4, backbone.device)

        def ask(config: Config, cache: CorpusCache = cache, tree: Codes = tree) -> None:
            engine = Engine(backbone, config, 300)
            for block in queries:
                state = engine.query_pass(cache, [block])
                search(engine, cache, tree, state, prompt.tokenizer.digits, Beam())

        times = fastest(*(lambda config=config: ask(config) for config in configs.values()), tries=2)
        taken[n] = dict(zip(configs, times, strict=True))
        own = taken[n]
        rows.append(
            (
                f"routing, {name}",
                f"N={n:,}, B=256, layer {middle} of {backbone.depth}, beam 25, {len(queries)} queries one by one",
                f"{own['dense'] / own['routed']:.2f}x dense decoding",
                f"reach=upper: {own['dense'] / own['upper']:.2f}x",
            )
        )
    first, last = sizes[0], sizes[-1]
    if first != last:
        grown = [f"{kind} {taken[last][kind] / taken[first][kind]:.1f}x" for kind in ("routed", "dense")]
        rows.append((f"routing, {name}", f"latency at N={last:,} over N={first:,}", grown[0], grown[1]))
    return rows


def memory_row(model: str, data: Path, n: int, dtype: str) -> list[Row]:
    """Indexing and a few queries in a process of its own."""
    command = [sys.executable, __file__, "--model", model, "--data", str(data), "--dtype", dtype, "--held", str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    held = told["cache"] + told["weights"]
    return [
        (
            "peak memory",
            f"{Path(model).name}, N={n:,}, {dtype}",
            f"{told['peak'] / held:.2f}x cache + weights",
            f"{told['peak'] / 1e9:.2f} GB over {held / 1e9:.2f} GB; before the model: {told['before'] / 1e9:.2f} GB",
        )
    ]


def held(model: str, data: Path, n: int, dtype: str) -> None:
    import transformers  # noqa: F401 - counted as what is there before the model

    from icr_bench.harness.cell import peak_rss

    before = peak_rss()
    retriever = BlockSearch(model=model, dtype=dtype)  # type: ignore[arg-type]
    retriever.load()
    retriever.index([Document(i, text) for i, text in enumerate(texts_of(data, n))])
    retriever.search(queries_of(data, 4), 10)
    weights = sum({p.data_ptr(): p.nbytes for p in retriever._loaded().backbone.parameters()}.values())
    told = {"peak": peak_rss(), "cache": retriever.index_bytes(), "weights": weights, "before": before}
    print(json.dumps(told))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("rows", nargs="*", help=f"what to measure: {', '.join(ROWS)}; all by default")
    options.add_argument("--model", required=True, help="folder or .gguf file, of SmolLM2-135M in the published table")
    options.add_argument("--data", type=Path, required=True, help="BEIR folder, the msmarco sample in that table")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--tiny", help="folder of a tiny model for the memory row")
    options.add_argument("--held", type=int, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.held:
        held(given.model, given.data, given.held, given.dtype)
        return
    wanted = given.rows or ROWS
    backbone, tokenizer, _ = load_backbone(given.model, "cpu", given.dtype)
    prompt = Prompt(tokenizer, PromptSettings(), 4)
    queries = [prompt.query(text) for text in queries_of(given.data, 32)]
    rows: list[Row] = []
    if "prefill" in wanted:
        rows += prefill_row(backbone, prompt, texts_of(given.data, 128))
    if "attention" in wanted:
        rows += attention_row(backbone, 110_000)
    if "batch" in wanted:
        texts = texts_of(given.data, 500)
        codes = draw_codes(texts, 4, 0)
        cache = random_cache(backbone, list(prompt.documents(texts, codes)), codes, 11_000)
        rows += batch_row(backbone, prompt, cache, queries)
    if "routing" in wanted:
        rows += routing_row("SmolLM2-135M", backbone, prompt, texts_of(given.data, 1000), queries[:4], (1000,))
        small = tiny(tokenizer, backbone.config.vocab_size)
        rows += routing_row("tiny", small, prompt, texts_of(given.data, 10_000), queries[:8], (500, 10_000))
    if "memory" in wanted:
        rows += memory_row(given.model, given.data, 500, given.dtype)
        if given.tiny:
            rows += memory_row(given.tiny, given.data, 10_000, given.dtype)
    threads = f"{torch.get_num_threads()} threads, {given.dtype}"
    print(tabulate(rows, ["what", "of", "reached", f"beside it ({threads})"], tablefmt="github"))


if __name__ == "__main__":
    main()
