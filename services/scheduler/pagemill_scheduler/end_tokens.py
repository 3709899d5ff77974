"""Which tokens end a sequence, and what that is called."""

from __future__ import annotations

from pagemill_shared.messages import FinishReason
from pagemill_shared.sampling import SamplingParams

MAX_KNOWN = 256

_EOS, _STOP_TOKEN = int(FinishReason.EOS), int(FinishReason.STOP_TOKEN)


class EndTokens:
    """Nearly all requests have the same end tokens: so they share one dict, which is in the cache of the processor when
    a sequence ends."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], dict[int, int]] = {}

    def of(self, sampling: SamplingParams) -> dict[int, int]:
        """The FinishReason, as a number, of each token that ends a sequence. Do not write to it."""
        eos = b"" if sampling.ignore_eos else sampling.eos_token_ids.tobytes()
        key = (eos, sampling.stop_token_ids.tobytes())
        ends = self._known.get(key)
        if ends is None:
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            ends = dict.fromkeys(sampling.stop_token_ids.tolist(), _STOP_TOKEN)
            if eos:
                ends |= dict.fromkeys(sampling.eos_token_ids.tolist(), _EOS)
            self._known[key] = ends
        return ends
