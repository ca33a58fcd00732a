"""Worker extension for vLLM that receives broadcast weights.

Start vLLM with `--worker-extension-cls ludus.engines.remote.vllm_worker_extension.LudusWorkerExtension`; its
environment must have this package, torch and pydantic. The trainer calls it through `/collective_rpc`.
Methods return None or an error's text and status, since an exception in a worker would end the server.
"""

from __future__ import annotations

from collections.abc import Callable

from ludus.engines.remote.gloo_broadcast import (
    TransferAddress,
    WeightManifest,
    WeightTransferGroup,
    join_as_server,
    receive_tensors,
    with_lm_head,
)
from ludus.errors import EngineError, SyncError

_CONFLICT, _BAD = 409, 400

Answer = dict[str, str | int] | None


class LudusWorkerExtension:
    """Methods mixed into vLLM's worker; supports one worker per server."""

    reload_weights: Callable[..., None]
    rank: int
    _ludus_group: WeightTransferGroup | None = None
    _ludus_manifest: WeightManifest | None = None

    def ludus_join_weight_group(self, text: str) -> Answer:
        """Join the trainer's process group at a `TransferAddress`, replacing an earlier one."""
        address, self._ludus_group = TransferAddress.model_validate_json(text), None
        if self.rank:
            return _error("The server has several workers; broadcasting supports one per server.", _BAD)
        try:
            self._ludus_group = join_as_server(address)
        except EngineError as error:
            return _error(str(error), _BAD)
        return None

    def ludus_prepare_weights(self, text: str) -> Answer:
        """Expect the weights of a `WeightManifest`; deltas are unsupported because vLLM fuses layers."""
        manifest = WeightManifest.model_validate_json(text)
        if self._ludus_group is None or manifest.base is not None:
            return _error("The worker has not joined a group, or has no base weights for a delta.", _CONFLICT)
        self._ludus_manifest = manifest
        return None

    def ludus_receive_weights(self, text: str) -> Answer:
        """Receive the trainer's weights and load them into vLLM."""
        group, manifest = self._ludus_group, self._ludus_manifest
        if group is None or manifest is None:
            return _error("No weights are expected.", _CONFLICT)
        self._ludus_manifest = None
        try:
            tensors = with_lm_head(receive_tensors(group, manifest))
            self.reload_weights(weights_iterator=iter(tensors.items()))
        except (EngineError, SyncError, ValueError, KeyError, RuntimeError) as error:
            if isinstance(error, EngineError):
                self._ludus_group = None
            return _error(str(error), _BAD)
        return None


def _error(message: str, status: int) -> Answer:
    return {"error": message, "status": status}
