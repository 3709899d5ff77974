"""What turns logits into log-probabilities."""

from __future__ import annotations

from torch import Tensor


def log_partition(logits: Tensor) -> Tensor:
    """[N, 1] the logarithm of the sum of the exponentials of each of [N, vocab_size] ``logits``.

    It has the same bits whatever rows stand beside it. torch's ``logsumexp`` has not: the sum of a row that is alone is
    shared out among threads. ``log_softmax`` takes each row by itself.
    """
    most = logits.argmax(-1, keepdim=True)
    return logits.gather(1, most) - logits.log_softmax(-1).gather(1, most)
