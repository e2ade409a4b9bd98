"""Picking the best k scores."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from icr_bench.retrievers.top import top_k


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=20), st.integers(1, 20), st.data())
def test_equals_a_full_sort(scores: list[float], k: int, data: st.DataObject) -> None:
    among = sorted(data.draw(st.sets(st.integers(0, len(scores) - 1))))
    ranking = top_k(np.array(scores), min(k, len(scores)), np.array(among, dtype=np.int64))
    assert list(ranking.numbers) == sorted(among, key=lambda i: (-scores[i], i))[: min(k, len(scores))]
    assert list(ranking.scores) == [scores[i] for i in ranking.numbers]
