"""The receiving end of a line of weights inside of vLLM's worker.

vLLM mixes the class into its worker where it is started with `--worker-extension-cls
ludus.engines.remote.vllm_worker_extension.LudusWorkerExtension`; its Python has to find this package, of
which torch and pydantic are enough. The trainer speaks to it through `/collective_rpc`. An answer is None, or
an error's words and status: what a worker raises would end the server.
"""

from __future__ import annotations

from collections.abc import Callable

from ludus.engines.remote.gloo_broadcast import (
    TransferAddress,
    WeightManifest,
    WeightTransferGroup,
    enter_line,
    take,
    with_head,
)
from ludus.errors import EngineError, SyncError

_CONFLICT, _BAD = 409, 400

Answer = dict[str, str | int] | None


class LudusWorkerExtension:
    """What the worker can do besides; one worker a server."""

    reload_weights: Callable[..., None]
    rank: int
    _ludus_line: WeightTransferGroup | None = None
    _ludus_expects: WeightManifest | None = None

    def ludus_join_weight_line(self, text: str) -> Answer:
        """Join the trainer's line at a `TransferAddress`, in place of an earlier one."""
        place, self._ludus_line = TransferAddress.model_validate_json(text), None
        if self.rank:
            return _error("It has several workers, and the line takes one a server.", _BAD)
        try:
            self._ludus_line = enter_line(place)
        except EngineError as error:
            return _error(str(error), _BAD)
        return None

    def ludus_prepare_weights(self, text: str) -> Answer:
        """Say what a `WeightManifest` announces; differences are none to a model whose layers are fused."""
        manifest = WeightManifest.model_validate_json(text)
        if self._ludus_line is None or manifest.base is not None:
            return _error("It is on no line, or holds no weights that a difference would be to.", _CONFLICT)
        self._ludus_expects = manifest
        return None

    def ludus_receive_weights(self, text: str) -> Answer:
        """Take what the trainer sends, and have vLLM load it."""
        line, manifest = self._ludus_line, self._ludus_expects
        if line is None or manifest is None:
            return _error("No weights are expected.", _CONFLICT)
        self._ludus_expects = None
        try:
            tensors = with_head(take(line, manifest))
            self.reload_weights(weights_iterator=iter(tensors.items()))
        except EngineError as error:
            self._ludus_line = None
            return _error(str(error), _BAD)
        except (SyncError, ValueError, KeyError, RuntimeError) as error:
            return _error(str(error), _BAD)
        return None


def _error(words: str, status: int) -> Answer:
    return {"error": words, "status": status}
