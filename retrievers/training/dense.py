"""The dense bi-encoder that in-context retrieval is compared with (facts 11), from the same backbone and data."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_gather as gather
from torch.utils.checkpoint import checkpoint

from icr_bench.retrievers.lm.backbone import Backbone, Layer
from icr_bench.retrievers.lm.cache import batches
from icr_bench.retrievers.lm.engine import Config
from icr_bench.retrievers.lm.prompt import Prompt
from icr_bench.retrievers.training.learner import Asked, Weights

TEMPERATURE = 0.02
"""Of the student's and the teacher's distribution."""


class DenseLearner(nn.Module):
    """A backbone whose last token's state, normalised, is a text's vector.

    The loss is InfoNCE over all documents of the batch, and of those of all other processes, plus ``kl`` times the
    divergence of the query's distribution over the documents that a teacher scored from the teacher's.
    """

    def __init__(self, backbone: Backbone, prompt: Prompt, kl: float) -> None:
        super().__init__()
        self.backbone, self.prompt, self.kl = backbone, prompt, kl

    def vectors(self, texts: Sequence[str], recompute: bool = False) -> Tensor:
        """(n, width), each of length 1: of the end token that follows the text, cut to the prompt's cap.

        Args:
            recompute: keep a layer's input only and compute the layer once more on the way back.
        """
        tokenizer = self.prompt.tokenizer
        most = self.prompt.settings.cap - 1
        ids = [[*encoding.ids[:most], tokenizer.end] for encoding in tokenizer.encode_batch(texts)]
        found: list[Tensor] = []
        places: list[int] = []
        for batch in batches([len(row) for row in ids]):
            found.append(self._last([ids[place] for place in batch], recompute))
            places += batch
        order = torch.tensor(places, device=self.backbone.device).argsort()
        return F.normalize(torch.cat(found)[order], dim=-1)

    def _last(self, ids: list[list[int]], recompute: bool) -> Tensor:
        device, longest = self.backbone.device, len(ids[0])
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in ids], device=device)
        cos, sin = self.backbone.rotation(torch.arange(longest, device=device))
        hidden = self.backbone.embed_tokens(tokens)

        def through(layer: Layer, hidden: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in layer.project(hidden, cos, sin))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return layer.finish(hidden, attended.transpose(1, 2))

        for layer in self.backbone.stack():
            if recompute and torch.is_grad_enabled():
                hidden = checkpoint(through, layer, hidden, use_reentrant=False)
            else:
                hidden = through(layer, hidden)
        ends = torch.tensor([len(row) - 1 for row in ids], device=device)
        last: Tensor = self.backbone.norm(hidden[torch.arange(len(ids), device=device), ends])
        return last

    def forward(
        self,
        batch: Asked,
        codes: Sequence[int],
        weights: Weights,
        config: Config,
        rng: random.Random,
        recompute: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and what a log shows of it; takes what `Learner` takes, of which the codes are not read."""
        queries, documents = self.vectors(batch.queries, recompute), self.vectors(batch.documents, recompute)
        scores = queries @ documents.T / TEMPERATURE
        elsewhere = queries @ _of_others(documents).T / TEMPERATURE
        chosen = torch.tensor([rng.choice(numbers) for numbers in batch.golds], device=scores.device)
        others = torch.zeros_like(scores, dtype=torch.bool)
        for query, numbers in enumerate(batch.golds):
            others[query, numbers] = True
        others.scatter_(1, chosen.unsqueeze(1), False)
        loss = F.cross_entropy(torch.cat([scores.masked_fill(others, -torch.inf), elsewhere], 1), chosen)
        hits = others.scatter(1, chosen.unsqueeze(1), True).gather(1, scores.argmax(1, keepdim=True))
        told = {"infonce": loss.detach(), "right": hits.float().mean()}
        if batch.scores is not None and self.kl:
            given = torch.as_tensor(batch.scores, dtype=scores.dtype, device=scores.device) / TEMPERATURE
            without = given.isnan()
            teacher = given.masked_fill(without, -torch.inf).log_softmax(1)
            student = scores.masked_fill(without, -torch.inf).log_softmax(1)
            each = teacher.exp() * (teacher - student)
            divergence = each.masked_fill(without, 0.0).sum(1).mean()
            told["kl"] = divergence.detach()
            loss = loss + self.kl * divergence
        most, encodings = self.prompt.settings.cap, self.prompt.tokenizer.encode_batch(batch.documents)
        read = sum(min(len(encoding.ids), most) for encoding in encodings)
        return loss, told | {"loss": loss.detach(), "tokens": torch.tensor(float(read))}


def _of_others(vectors: Tensor) -> Tensor:
    """The vectors (n, width) of all other processes' documents, of which each has as many; gradients flow back to
    them."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return vectors[:0]
    own = distributed.get_rank()
    found = gather(vectors.contiguous())
    return torch.cat([part for rank, part in enumerate(found) if rank != own])


def sentence_transformer(folder: Path, width: int, cap: int) -> None:
    """Write beside a model what sentence-transformers reads: last-token pooling, then length 1."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    pooling = {"word_embedding_dimension": width, "pooling_mode_lasttoken": True, "include_prompt": True}
    pooling |= dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_max_tokens"), False)
    files: dict[str, Any] = {
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "2_Normalize/config.json": {},
        "sentence_bert_config.json": {"max_seq_length": cap, "do_lower_case": False},
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine"},
    }
    for name, told in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
