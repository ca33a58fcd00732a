"""The repetition penalty of R-Zero (arXiv:2508.05004): the share of a batch that is in a proposal's cluster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage

THRESHOLD = 0.5
"""Average distance up to which clusters are merged."""
_MAX_N = 4
_SMOOTHING = 0.1


def bleu(words: Sequence[str], reference: Sequence[str]) -> float:
    """Return the BLEU score of a sentence with one reference, up to 4-grams of equal weight.

    A precision of 0 above unigrams is smoothed to 0.1 divided by the number of n-grams (method 1 of Chen and Cherry).
    """
    total = 0.0
    for n in range(1, _MAX_N + 1):
        given, wanted = (Counter(zip(*(one[i:] for i in range(n)), strict=False)) for one in (words, reference))
        matches = (given & wanted).total()
        if n == 1 and not matches:
            return 0.0
        total += math.log((matches or _SMOOTHING) / max(1, given.total()))
    brevity = min(0.0, 1 - len(reference) / len(words))
    return math.exp(total / _MAX_N + brevity)


def cluster_shares(texts: Sequence[str]) -> list[float]:
    """Return the share of texts in the cluster of each text: average linkage on 1 - BLEU, cut at `THRESHOLD`.

    The words of a text are separated by white space. Of a pair the earlier text is scored against the later one; equal
    texts have the distance 0.
    """
    if len(texts) < 2:
        return [1.0] * len(texts)
    words = [text.split() for text in texts]
    distances = [0.0 if a == b else 1 - bleu(a, b) for a, b in combinations(words, 2)]
    clusters = fcluster(linkage(np.array(distances), "average"), THRESHOLD, "distance").tolist()
    sizes = Counter(clusters)
    return [sizes[one] / len(texts) for one in clusters]
