"""The engine's counts as Prometheus reads them."""

from __future__ import annotations

from ludus.gateway.service import CompletionService


def prometheus_text(service: CompletionService) -> str:
    """Counters and gauges in the text format 0.0.4."""
    stats = service.engine.stats()
    counters = {
        "requests_total": ("Choices asked for.", service.num_requests),
        "passes_total": ("Forward passes.", stats.steps),
        "prefill_tokens_total": ("Tokens computed as context.", stats.prefill_tokens),
        "cached_tokens_total": ("Context tokens found in the cache.", stats.cached_tokens),
        "decode_tokens_total": ("Tokens sampled.", stats.decode_tokens),
        "recomputed_tokens_total": ("Tokens computed again after new weights.", stats.recomputed_tokens),
        "batch_tokens_total": ("Tokens of all passes.", stats.batch_tokens),
        "evicted_pages_total": ("Cache pages thrown out.", stats.evicted_pages),
        "model_seconds_total": ("Seconds in forward passes.", stats.model_s),
        "sample_seconds_total": ("Seconds in drawing tokens.", stats.sample_s),
        "running_sum_total": ("Requests that were sampled, summed over the passes.", stats.running_steps),
        "waiting_sum_total": ("Requests that waited, summed over the passes.", stats.queue_steps),
        "schedule_seconds_total": ("Seconds in all else of the passes.", stats.schedule_s),
    }
    gauges = {
        "choices_under_way": ("Choices that wait or are sampled.", service.num_under_way),
        "paused": ("1 while paused.", int(service.is_paused)),
        "weight_version": ("The version of the weights in use.", service.engine.version),
    }
    lines: list[str] = []
    for kind, family in (("counter", counters), ("gauge", gauges)):
        for name, (told, value) in family.items():
            lines += [f"# HELP ludus_{name} {told}", f"# TYPE ludus_{name} {kind}", f"ludus_{name} {value}"]
    return "\n".join(lines) + "\n"
